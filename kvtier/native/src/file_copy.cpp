#include "file_copy.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "bus_guard.hpp"

#if !defined(MADV_POPULATE_READ) && defined(__linux__)
#define MADV_POPULATE_READ 22  // older headers, perhaps a newer kernel
#endif

namespace kvtier {

namespace {

// A mapping that begins and ends at these lets the kernel hand out whole large pages of its cache at one fault: a fault for
// each 64 KiB costs as much as copying them.
constexpr std::size_t large_page_bytes = std::size_t{2} << 20;

std::size_t whole_large_pages(std::size_t size) {
  return (size + large_page_bytes - 1) / large_page_bytes * large_page_bytes;
}

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

class Mapping {
 public:
  Mapping(int descriptor, std::uint64_t offset, std::size_t size)
      : size_(size), data_(mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, static_cast<off_t>(offset))) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (is_there()) munmap(data_, size_);
  }

  bool is_there() const { return data_ != MAP_FAILED; }
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  void* data_;
};

// The part of a file that holds [offset, offset + size), mapped from and to ends of large pages.
class Window {
 public:
  Window(int descriptor, std::uint64_t offset, std::size_t size)
      : skipped_(static_cast<std::size_t>(offset % large_page_bytes)),
        mapping_(descriptor, offset - skipped_, whole_large_pages(skipped_ + size)) {}

  const Mapping& mapping() const { return mapping_; }
  const std::uint8_t* begin() const { return mapping_.data() + skipped_; }

 private:
  std::size_t skipped_;
  Mapping mapping_;
};

// The whole small pages around [begin, begin + size).
struct Pages {
  Pages(const std::uint8_t* begin, std::size_t size)
      : first(reinterpret_cast<std::uintptr_t>(begin) / page_bytes() * page_bytes()),
        end((reinterpret_cast<std::uintptr_t>(begin) + size + page_bytes() - 1) / page_bytes() * page_bytes()) {}

  std::uintptr_t first;
  std::uintptr_t end;
};

bool is_cached(const Pages& asked_of) {
  const std::uintptr_t end = asked_of.end;
  std::array<unsigned char, 1024> pages;
  const std::size_t step = pages.size() * page_bytes();
  for (std::uintptr_t at = asked_of.first; at < end; at += step) {
    const std::size_t asked = std::min(step, static_cast<std::size_t>(end - at));
    const std::size_t count = asked / page_bytes();
    if (mincore(reinterpret_cast<void*>(at), asked, pages.data()) != 0) return false;
    if (!std::all_of(pages.begin(), pages.begin() + count, [](unsigned char page) { return (page & 1) != 0; })) {
      return false;
    }
  }
  return true;
}

struct Work {
  const xxh3::Kernel* kernel;
  const FileCopy* wanted;
  const std::uint8_t* source;
  std::uint64_t checksum;
};

void copy(void* argument) {
  Work& work = *static_cast<Work*>(argument);
  const FileCopy& wanted = *work.wanted;
  if (wanted.head_size != 0) std::memcpy(wanted.head, work.source, wanted.head_size);
  work.checksum = copy_checksum(*work.kernel, stores_for(wanted.body_size), wanted.body,
                                work.source + wanted.head_size, wanted.body_size);
}

}  // namespace

FileCopied copy_from_file(const xxh3::Kernel& kernel, const FileCopy& wanted, Residency residency) {
  const std::size_t size = wanted.head_size + wanted.body_size;
  const Window window(wanted.descriptor, wanted.offset, size);
  if (!window.mapping().is_there()) return {errno, false, 0};
  if (residency == Residency::cached && !is_cached(Pages(window.begin(), size))) return {0, true, 0};
  Work work{&kernel, &wanted, window.begin(), 0};
  if (!run_guarded(window.begin(), size, &copy, &work)) return {EIO, false, 0};
  return {0, false, work.checksum};
}

bool warm_from_file(int descriptor, std::uint64_t offset, std::size_t size) {
#if defined(MADV_POPULATE_READ) && defined(MADV_HUGEPAGE)
  const Window window(descriptor, offset, size);
  if (!window.mapping().is_there()) return false;
  const Pages pages(window.begin(), size);
  madvise(window.mapping().data(), window.mapping().size(), MADV_HUGEPAGE);  // as it may: small pages do too
  return madvise(reinterpret_cast<void*>(pages.first), pages.end - pages.first, MADV_POPULATE_READ) == 0;
#else
  (void)descriptor, (void)offset, (void)size;
  return false;
#endif
}

}  // namespace kvtier
