/*
 * Preload library that makes file I/O fail on demand: errors, short transfers, latency.
 *
 * Rules and counters live in a small control file (variable DISKSHIM_CONTROL) that every process
 * maps shared, so that a test changes rules and reads counters while the processes run. The layout is
 * that of `diskshim.py`. A call is matched by the path of its descriptor, read from /proc/self/fd.
 *
 * Limits: I/O through mmap, io_uring, direct system calls and the C library's own buffered streams
 * does not pass here. A read that must not wait (RWF_NOWAIT) gets EAGAIN in place of latency, as from
 * the kernel when the disk is slow.
 */
#undef _FORTIFY_SOURCE
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RULES_COUNT_MAX 16
#define PREFIX_BYTES_MAX 512
#define CONTROL_MAGIC UINT64_C(0x316d696873647674)

enum operation { OP_READ = 1, OP_WRITE = 2, OP_SYNC = 4, OP_ALLOCATE = 8 };
enum action { ACT_NONE = 0, ACT_ERROR = 1, ACT_SHORT = 2, ACT_LATENCY = 3 };

struct rule {
    _Atomic uint32_t armed;
    uint32_t operations;
    uint32_t action;
    int32_t error;
    uint64_t first;      /* inject from the n-th matching call on, counted from 1 */
    uint64_t count_max;  /* at most so many times; 0: without end */
    uint64_t short_bytes;
    uint64_t latency_us;
    _Atomic uint64_t matched;
    _Atomic uint64_t injected;
    char prefix[PREFIX_BYTES_MAX];
};

struct control {
    uint64_t magic;
    struct rule rules[RULES_COUNT_MAX];
};

static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("DISKSHIM_CONTROL");
    if (path == NULL) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct control *mapped = MAP_FAILED;
    if (fd >= 0) {
        mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
    }
    if (mapped == MAP_FAILED || mapped->magic != CONTROL_MAGIC) {
        fprintf(stderr, "diskshim: cannot use control file %s\n", path);
        abort();
    }
    control = mapped;
}

/* What to do with one call; `bytes` is lowered by a short transfer. */
struct verdict {
    int error;
    size_t bytes;
};

static int path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return -1;
    path[length] = '\0';
    return 0;
}

static _Thread_local int must_not_wait;

static void wait_us(uint64_t us) {
    struct timespec rest = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
}

static struct verdict judge(enum operation operation, int fd, size_t bytes) {
    struct verdict verdict = {0, bytes};
    if (control == NULL) return verdict;
    int saved = errno;
    char path[PATH_MAX];
    int known = 0;
    for (int i = 0; i < RULES_COUNT_MAX && verdict.error == 0; i++) {
        struct rule *rule = &control->rules[i];
        if (!atomic_load_explicit(&rule->armed, memory_order_acquire)) continue;
        if (!(rule->operations & operation)) continue;
        if (!known) {
            if (path_of(fd, path, sizeof path) != 0) break;
            known = 1;
        }
        if (strncmp(path, rule->prefix, strnlen(rule->prefix, PREFIX_BYTES_MAX)) != 0) continue;
        uint64_t number = atomic_fetch_add(&rule->matched, 1) + 1;
        if (number < rule->first) continue;
        if (rule->count_max != 0 && number - rule->first >= rule->count_max) continue;
        if (rule->action == ACT_SHORT && verdict.bytes <= rule->short_bytes) continue;
        atomic_fetch_add(&rule->injected, 1);
        if (rule->action == ACT_ERROR) verdict.error = rule->error;
        if (rule->action == ACT_SHORT) verdict.bytes = rule->short_bytes;
        if (rule->action != ACT_LATENCY) continue;
        if (must_not_wait) {
            verdict.error = EAGAIN;
        } else {
            wait_us(rule->latency_us);
        }
    }
    errno = saved;
    return verdict;
}

/* A short vector: the longest whole prefix of it, and a part of the next piece. */
static int shorten(const struct iovec *from, int count, size_t bytes, struct iovec *to) {
    int used = 0;
    while (used < count && bytes > 0) {
        to[used] = from[used];
        if (to[used].iov_len > bytes) to[used].iov_len = bytes;
        bytes -= to[used].iov_len;
        used++;
    }
    return used;
}

static size_t total(const struct iovec *vector, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += vector[i].iov_len;
    return bytes;
}

#define FAIL_IF(verdict)                \
    do {                                \
        if ((verdict).error != 0) {     \
            errno = (verdict).error;    \
            return -1;                  \
        }                               \
    } while (0)

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL) abort();
    return found;
}

#define FLAT(result, name, operation, buffer, parameters, ...)      \
    result name parameters {                                        \
        static __typeof__(&name) next;                              \
        if (next == NULL) next = REAL(name);                        \
        struct verdict verdict = judge(operation, fd, size);        \
        FAIL_IF(verdict);                                           \
        return next(fd, buffer, verdict.bytes, ##__VA_ARGS__);      \
    }

#define VECTOR(name, operation, parameters, ...)                                    \
    ssize_t name parameters {                                                       \
        static __typeof__(&name) next;                                              \
        if (next == NULL) next = REAL(name);                                        \
        if (count <= 0 || count > IOV_MAX) return next(fd, vector, count, ##__VA_ARGS__); \
        size_t asked = total(vector, count);                                        \
        struct verdict verdict = judge(operation, fd, asked);                       \
        FAIL_IF(verdict);                                                           \
        if (verdict.bytes == asked) return next(fd, vector, count, ##__VA_ARGS__);  \
        struct iovec cut[IOV_MAX];                                                  \
        int used = shorten(vector, count, verdict.bytes, cut);                      \
        return next(fd, cut, used, ##__VA_ARGS__);                                  \
    }

#define PLAIN(name, operation, parameters, ...)             \
    int name parameters {                                   \
        static __typeof__(&name) next;                      \
        if (next == NULL) next = REAL(name);                \
        struct verdict verdict = judge(operation, fd, 0);   \
        FAIL_IF(verdict);                                   \
        return next(__VA_ARGS__);                           \
    }

FLAT(ssize_t, write, OP_WRITE, data, (int fd, const void *data, size_t size))
FLAT(ssize_t, pwrite, OP_WRITE, data, (int fd, const void *data, size_t size, off_t at), at)
FLAT(ssize_t, pwrite64, OP_WRITE, data, (int fd, const void *data, size_t size, off64_t at), at)
FLAT(ssize_t, read, OP_READ, data, (int fd, void *data, size_t size))
FLAT(ssize_t, pread, OP_READ, data, (int fd, void *data, size_t size, off_t at), at)
FLAT(ssize_t, pread64, OP_READ, data, (int fd, void *data, size_t size, off64_t at), at)

/* What code compiled with _FORTIFY_SOURCE calls; `room` is the size of the buffer. */
ssize_t __read_chk(int fd, void *data, size_t size, size_t room);
ssize_t __pread_chk(int fd, void *data, size_t size, off_t at, size_t room);
ssize_t __pread64_chk(int fd, void *data, size_t size, off64_t at, size_t room);
FLAT(ssize_t, __read_chk, OP_READ, data, (int fd, void *data, size_t size, size_t room), room)
FLAT(ssize_t, __pread_chk, OP_READ, data,
     (int fd, void *data, size_t size, off_t at, size_t room), at, room)
FLAT(ssize_t, __pread64_chk, OP_READ, data,
     (int fd, void *data, size_t size, off64_t at, size_t room), at, room)

VECTOR(writev, OP_WRITE, (int fd, const struct iovec *vector, int count))
VECTOR(pwritev, OP_WRITE, (int fd, const struct iovec *vector, int count, off_t at), at)
VECTOR(pwritev64, OP_WRITE, (int fd, const struct iovec *vector, int count, off64_t at), at)
VECTOR(readv, OP_READ, (int fd, const struct iovec *vector, int count))
VECTOR(preadv, OP_READ, (int fd, const struct iovec *vector, int count, off_t at), at)
VECTOR(preadv64, OP_READ, (int fd, const struct iovec *vector, int count, off64_t at), at)
VECTOR(pwritev2, OP_WRITE,
       (int fd, const struct iovec *vector, int count, off_t at, int flags), at, flags)
VECTOR(pwritev64v2, OP_WRITE,
       (int fd, const struct iovec *vector, int count, off64_t at, int flags), at, flags)
static ssize_t (*next_preadv2)(int, const struct iovec *, int, off64_t, int);

static ssize_t preadv2_judged(int fd, const struct iovec *vector, int count, off64_t at, int flags) {
    if (next_preadv2 == NULL) next_preadv2 = (__typeof__(next_preadv2))real("preadv64v2");
    if (count <= 0 || count > IOV_MAX) return next_preadv2(fd, vector, count, at, flags);
    size_t asked = total(vector, count);
    must_not_wait = (flags & RWF_NOWAIT) != 0;
    struct verdict verdict = judge(OP_READ, fd, asked);
    must_not_wait = 0;
    FAIL_IF(verdict);
    if (verdict.bytes == asked) return next_preadv2(fd, vector, count, at, flags);
    struct iovec cut[IOV_MAX];
    return next_preadv2(fd, cut, shorten(vector, count, verdict.bytes, cut), at, flags);
}

ssize_t preadv2(int fd, const struct iovec *vector, int count, off_t at, int flags) {
    return preadv2_judged(fd, vector, count, at, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *vector, int count, off64_t at, int flags) {
    return preadv2_judged(fd, vector, count, at, flags);
}

PLAIN(fsync, OP_SYNC, (int fd), fd)
PLAIN(fdatasync, OP_SYNC, (int fd), fd)
PLAIN(sync_file_range, OP_SYNC, (int fd, off64_t at, off64_t size, unsigned flags), fd, at, size,
      flags)
PLAIN(ftruncate, OP_ALLOCATE, (int fd, off_t size), fd, size)
PLAIN(ftruncate64, OP_ALLOCATE, (int fd, off64_t size), fd, size)
PLAIN(fallocate, OP_ALLOCATE, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
PLAIN(fallocate64, OP_ALLOCATE, (int fd, int mode, off64_t at, off64_t size), fd, mode, at, size)

/* These two return the error instead of setting errno. */
#define POSIX_ALLOCATE(name, offset)                                 \
    int name(int fd, offset at, offset size) {                       \
        static __typeof__(&name) next;                               \
        if (next == NULL) next = REAL(name);                         \
        struct verdict verdict = judge(OP_ALLOCATE, fd, 0);          \
        return verdict.error != 0 ? verdict.error : next(fd, at, size); \
    }

POSIX_ALLOCATE(posix_fallocate, off_t)
POSIX_ALLOCATE(posix_fallocate64, off64_t)
