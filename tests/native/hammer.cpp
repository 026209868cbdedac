// Threads hammer what processes share, for ThreadSanitizer (scripts/sanitize_threads.sh): a writer and readers on the arena's
// directory and slots; a giver and a taker on a ring. Then the arena in memory that three processes share, where only what is
// read can tell. Payloads say whose they are: every word is the block's number and the version that was written.
//
//   hammer arena|ring|processes|control SECONDS     0: no reader ever saw anything but a whole block or a miss
//
// `control` has a race on purpose: a sanitizer that does not report it is none.
// What must not live here: Python, timing.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "../../kvtier/native/src/arena.hpp"
#include "../../kvtier/native/src/copy.hpp"
#include "../../kvtier/native/src/ring.hpp"

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#else
void AnnotateIgnoreReadsBegin(const char*, int) {}
void AnnotateIgnoreReadsEnd(const char*, int) {}
#endif

namespace {

using namespace kvtier;
using Clock = std::chrono::steady_clock;
using Name = std::array<std::uint8_t, arena::name_bytes>;

constexpr std::uint64_t slots_count = 8;
constexpr std::uint64_t slot_bytes = 128 * 1024;
constexpr std::uint64_t buckets_count = 64;
constexpr std::uint64_t numbers_count = 12;
constexpr std::uint64_t readers_count = 2;
constexpr std::uint64_t hits_min = 200;
constexpr double give_up_s = 120;
constexpr std::uint64_t nobody = ~std::uint64_t{0};

double seconds_since(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

// A number that orders nothing: what is hammered must be in order without the hammer's help.
class Count {
 public:
  void add() { value_.fetch_add(1, std::memory_order_relaxed); }
  void set(std::uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// What the processes share beside the arena.
struct Board {
  Count hits;
  Count misses;
  Count torn;   // copied while it was replaced, and known for it
  Count wrong;  // must stay 0
  Count is_over;
};

template <typename T>
T* shared(std::size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<T*>(memory);
}

Name name_of(std::uint64_t number) {
  Name name{};
  std::memcpy(name.data() + 32, &number, sizeof number);
  return name;
}

void describe(std::vector<std::uint8_t>& payload, std::uint64_t size, std::uint64_t number, std::uint64_t version) {
  const std::uint64_t word = number << 32 | (version & 0xFFFFFFFFU);
  for (std::uint64_t at = 0; at < size; at += sizeof word) std::memcpy(payload.data() + at, &word, sizeof word);
}

bool is_described(const std::vector<std::uint8_t>& payload, std::uint64_t size, std::uint64_t number) {
  std::uint64_t first = 0;
  std::memcpy(&first, payload.data(), sizeof first);
  for (std::uint64_t at = 0; at < size; at += sizeof first) {
    std::uint64_t word = 0;
    std::memcpy(&word, payload.data() + at, sizeof word);
    if (word != first) return false;
  }
  return first >> 32 == number;
}

// Lengths of all ways that a copy takes: short, with a tail, whole rounds, past the caches where it may.
std::uint64_t some_size(std::mt19937_64& dice) {
  constexpr std::array<std::uint64_t, 6> sizes{8, 240, 1024, 4096 + 8, 40960, slot_bytes};
  return sizes[dice() % sizes.size()];
}

struct Arena {
  std::uint8_t* directory;
  std::uint8_t* slots;
  Board* board;

  Arena() : directory(nullptr), slots(nullptr), board(shared<Board>(sizeof(Board))) {
    const std::size_t size = arena::header_bytes + 8 * buckets_count + arena::entry_bytes * slots_count;
    directory = shared<std::uint8_t>(size);
    slots = shared<std::uint8_t>(slots_count * slot_bytes);
    const std::array<std::uint64_t, 7> header{0x414e45524154564bULL,
                                              arena::abi_version | std::uint64_t{arena::entry_bytes} << 32,
                                              77,  // epoch
                                              1,   // serving
                                              slots_count,
                                              buckets_count,
                                              slots_count * slot_bytes};
    std::memcpy(directory, header.data(), sizeof header);
    arena::Geometry geometry{};
    if (arena::read_geometry(directory, size, geometry) != arena::HeaderFault::none) std::abort();
  }

  arena::Directory opened() const {
    return arena::Directory(directory, {77, slots_count, buckets_count, slots_count * slot_bytes, true});
  }
};

bool is_enough(const Board& board, Clock::time_point since, double seconds) {
  const double gone_s = seconds_since(since);
  return (gone_s >= seconds && board.hits.get() >= hits_min) || gone_s >= give_up_s || board.wrong.get() != 0;
}

// Publishes blocks over each other, in slots that readers are copying.
void write_blocks(const Arena& in, double seconds) {
  arena::Directory directory = in.opened();
  std::mt19937_64 dice(1);
  std::vector<std::uint64_t> holds(slots_count, nobody);  // numbers, by entry
  std::vector<std::uint8_t> source(slot_bytes);
  const Clock::time_point since = Clock::now();
  for (std::uint64_t version = 0; !is_enough(*in.board, since, seconds); ++version) {
    const std::uint64_t entry = dice() % slots_count;
    const std::uint64_t number = dice() % numbers_count;
    for (std::uint64_t other = 0; other < slots_count; ++other) {
      if (holds[other] != nobody && (other == entry || holds[other] == number)) {
        directory.remove(other, name_of(holds[other]).data());
        holds[other] = nobody;
      }
    }
    const std::uint64_t size = some_size(dice);
    describe(source, size, number, version);
    std::uint8_t* slot = in.slots + entry * slot_bytes;
    const Stores stores = version % 2 != 0 ? Stores::streamed : Stores::cached;
    const std::uint64_t checksum = copy_checksum(xxh3::best(), stores, slot, source.data(), size);
    const arena::Block block{entry, entry * slot_bytes, version, size, checksum};
    if (!directory.publish(name_of(number).data(), block)) std::abort();
    holds[entry] = number;
  }
  in.board->is_over.set(1);
}

// What a reader of shared memory does (arena_bindings.cpp): find, copy, look whether it is still the same.
void read_one(const Arena& in, std::uint64_t number, std::vector<std::uint8_t>& target) {
  const arena::Directory directory = in.opened();
  const Name name = name_of(number);
  const arena::Found found = directory.find(name.data());
  if (found.entry == arena::nowhere) {
    in.board->misses.add();
    return;
  }
  const std::uint64_t size = found.frame[arena::payload_bytes_word];
  if (!arena::is_of_name(found.frame, name.data()) || size > slot_bytes || found.slot_offset % slot_bytes != 0) {
    in.board->wrong.add();
    return;
  }
  // A slot is copied while it may be written: no copy counts before its generation was looked at again. That, and only
  // that, the sanitizer is asked to pass over.
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const std::uint64_t seen =
      copy_checksum(xxh3::best(), Stores::cached, target.data(), in.slots + found.slot_offset, size);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  if (!directory.is_unchanged(found)) {
    in.board->torn.add();
  } else if (seen != found.frame[arena::payload_checksum_word] || !is_described(target, size, number)) {
    in.board->wrong.add();
  } else {
    in.board->hits.add();
  }
}

void read_blocks(const Arena& in, std::uint64_t seed) {
  std::mt19937_64 dice(seed);
  std::vector<std::uint8_t> target(slot_bytes);
  while (in.board->is_over.get() == 0) read_one(in, dice() % numbers_count, target);
}

int judged(const Arena& in, const char* what) {
  const Board& board = *in.board;
  std::cout << what << ": " << board.hits.get() << " hits, " << board.misses.get() << " misses, " << board.torn.get()
            << " torn, " << board.wrong.get() << " wrong\n";
  return board.wrong.get() == 0 && board.hits.get() >= hits_min ? 0 : 1;
}

int hammer_arena(double seconds) {
  const Arena in;
  std::vector<std::thread> readers;
  for (std::uint64_t n = 0; n < readers_count; ++n) readers.emplace_back([&in, n] { read_blocks(in, n + 2); });
  write_blocks(in, seconds);
  for (std::thread& reader : readers) reader.join();
  return judged(in, "arena, threads");
}

int hammer_processes(double seconds) {
  const Arena in;
  for (std::uint64_t n = 0; n < readers_count; ++n) {
    if (fork() == 0) {
      read_blocks(in, n + 2);
      _exit(0);
    }
  }
  write_blocks(in, seconds);
  int failed = 0;
  for (std::uint64_t n = 0; n < readers_count; ++n) {
    int status = 0;
    if (wait(&status) < 0 || status != 0) failed = 1;
  }
  return judged(in, "arena, processes") | failed;
}

constexpr std::uint64_t ring_bytes = 64 * 1024;
constexpr std::uint64_t wait_us = 200;
constexpr std::uint64_t no_more = std::uint64_t{1} << 63;

struct Ring {
  std::uint8_t* memory = shared<std::uint8_t>(ring::control_bytes + ring_bytes);
  Count announced;  // payloads that the giver gives; what the socket tells in the service. The top bit: no more
  Count taken;
  Count wrong;
};

std::uint64_t size_of(std::uint64_t payload) {
  std::mt19937_64 dice(payload);
  return some_size(dice);
}

void give_payloads(Ring& in, double seconds) {
  ring::Giver giver(ring_bytes);
  std::vector<std::uint8_t> source(slot_bytes);
  const Clock::time_point since = Clock::now();
  for (std::uint64_t n = 0; seconds_since(since) < seconds || n < hits_min; ++n) {
    const std::uint64_t size = size_of(n);
    describe(source, size, n, 0);
    in.announced.set(n + 1);
    std::uint64_t checksum = 0;
    ring::Status status{};
    do {
      status = giver.give(in.memory, source.data(), size, n, wait_us, checksum);
    } while (status == ring::Status::waiting || !giver.is_between());
  }
  in.announced.set(in.announced.get() | no_more);
}

void take_payloads(Ring& in) {
  ring::Taker taker(ring_bytes);
  std::vector<std::uint8_t> target(slot_bytes + 64);
  std::uint8_t* aligned = target.data() + (64 - reinterpret_cast<std::uintptr_t>(target.data()) % 64) % 64;
  for (std::uint64_t n = 0;;) {
    const std::uint64_t announced = in.announced.get();
    if (n >= (announced & ~no_more)) {
      if ((announced & no_more) != 0) return;
      std::this_thread::yield();
      continue;
    }
    ring::Share share{.bytes = std::uint64_t{1} << 30, .idle_us = wait_us, .idle_us_left = wait_us};
    ring::Taken taken;
    const std::uint64_t size = size_of(n);
    const ring::Status status = taker.take(in.memory, aligned, size, n, share, taken);
    if (status == ring::Status::waiting) {
      taker.awake(in.memory);
      continue;
    }
    const std::vector<std::uint8_t> got(aligned, aligned + size);
    const bool is_right = status == ring::Status::done && taken.seen == taken.declared && is_described(got, size, n);
    (is_right ? in.taken : in.wrong).add();
    if (!is_right) std::_Exit(1);
    ++n;
  }
}

int hammer_ring(double seconds) {
  Ring in;
  std::thread taker([&in] { take_payloads(in); });
  give_payloads(in, seconds);
  taker.join();
  std::cout << "ring, threads: " << in.taken.get() << " taken, " << in.wrong.get() << " wrong\n";
  return in.wrong.get() == 0 && in.taken.get() >= hits_min ? 0 : 1;
}

int race_on_purpose() {
  std::uint64_t word = 0;
  std::thread other([&word] { word += 1; });
  word += 2;
  other.join();
  std::cout << "control: " << word << "\n";
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string_view what = count > 1 ? arguments[1] : "";
  const double seconds = count > 2 ? std::atof(arguments[2]) : 1;
  if (what == "arena") return hammer_arena(seconds);
  if (what == "ring") return hammer_ring(seconds);
  if (what == "processes") return hammer_processes(seconds);
  if (what == "control") return race_on_purpose();
  std::cerr << "usage: hammer arena|ring|processes|control SECONDS\n";
  return 2;
}
