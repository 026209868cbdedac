#include "ring.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "copy.hpp"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <ctime>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier::ring {

// Memory order. Bytes of the ring are written before `staged` is (release) and read after it was (acquire); they are read
// before `taken` is written (release), and written again after it was read (acquire). A side that goes to sleep says so
// and then looks once more; the other advances its counter and then looks whether somebody sleeps: all four sequentially
// consistent, so that one of the two sees the other. The ring's bytes may be written while the taker reads them, by a
// giver that is broken: each is loaded once, and hashed as it is stored.
namespace {

constexpr std::size_t staged_at = 0;  // bytes that were ever staged; the giver's
constexpr std::size_t taken_at = 64;  // bytes that were ever taken; the taker's
constexpr std::size_t taker_sleeps_at = 128;
constexpr std::size_t giver_waits_at = 192;  // a futex
constexpr std::uint64_t piece_bytes = 256 * 1024;
constexpr std::uint64_t pieces_min = 4;  // of a ring: one is taken while others are staged
constexpr int looks_between_clocks = 32;

using Clock = std::chrono::steady_clock;

template <typename T>
std::atomic_ref<T> word(std::uint8_t* memory, std::size_t at) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(memory + at));
}

std::uint64_t load(const std::uint8_t* memory, std::size_t at, std::memory_order order) {
  return word<std::uint64_t>(const_cast<std::uint8_t*>(memory), at).load(order);
}

std::uint64_t aligned(std::uint64_t position, std::uint64_t to) { return (position + to - 1) / to * to; }

std::uint64_t trailer_of(std::uint64_t begin, std::uint64_t size) { return aligned(begin + size, 8); }

std::uint8_t* at(std::uint8_t* memory, std::uint64_t position, std::uint64_t ring_bytes) {
  return memory + control_bytes + position % ring_bytes;
}

std::uint64_t until_end(std::uint64_t position, std::uint64_t ring_bytes) { return ring_bytes - position % ring_bytes; }

std::uint64_t elapsed_us(Clock::time_point since) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since).count());
}

void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Looks again and again until `is_so` or the time is over. It keeps its processor: who gives that up on a busy machine gets
// it back much later than what it waits for takes.
template <typename Test>
bool spin(std::uint64_t us, Test is_so) {
  if (is_so()) return true;
  const Clock::time_point since = Clock::now();
  for (;;) {
    for (int i = 0; i < looks_between_clocks; ++i) {
      breathe();
      if (is_so()) return true;
    }
    if (elapsed_us(since) >= us) return false;
  }
}

void futex_wait(std::uint8_t* memory, std::size_t word_at, std::uint64_t us) {
  const timespec limit{static_cast<time_t>(us / 1000000), static_cast<long>(us % 1000000 * 1000)};
  syscall(SYS_futex, memory + word_at, FUTEX_WAIT, 1, &limit, nullptr, 0);
}

void futex_wake(std::uint8_t* memory, std::size_t word_at) {
  syscall(SYS_futex, memory + word_at, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

bool Giver::has_room(const std::uint8_t* memory, std::uint64_t end) const {
  return end - load(memory, taken_at, std::memory_order_acquire) <= ring_bytes_;
}

Status Giver::wait_for_room(std::uint8_t* memory, std::uint64_t end, std::uint64_t wait_us) const {
  constexpr std::uint64_t spin_us = 50;
  const auto has_it = [&] { return has_room(memory, end); };
  if (spin(std::min(wait_us, spin_us), has_it)) return Status::done;
  if (wait_us <= spin_us) return Status::waiting;
  auto waits = word<std::uint32_t>(memory, giver_waits_at);
  waits.store(1, std::memory_order_seq_cst);
  if (end - word<std::uint64_t>(memory, taken_at).load(std::memory_order_seq_cst) > ring_bytes_) {
    futex_wait(memory, giver_waits_at, wait_us - spin_us);
  }
  waits.store(0, std::memory_order_relaxed);
  return has_it() ? Status::done : Status::waiting;
}

// Says what is staged; answers wake where the taker sleeps.
Status Giver::advance(std::uint8_t* memory, std::uint64_t position) {
  word<std::uint64_t>(memory, staged_at).store(position, std::memory_order_seq_cst);
  auto sleeps = word<std::uint32_t>(memory, taker_sleeps_at);
  std::uint32_t yes = 1;
  if (sleeps.load(std::memory_order_seq_cst) == 0) return Status::done;
  return sleeps.compare_exchange_strong(yes, 0) ? Status::wake : Status::done;
}

Status Giver::give(std::uint8_t* memory, const std::uint8_t* source, std::uint64_t size, std::uint64_t label,
                   std::uint64_t wait_us, std::uint64_t& checksum) {
  if (!begun_) {
    position_ = aligned(position_, alignment);
    payload_ = {.size = size};
    begun_ = true;
  }
  const xxh3::Kernel& kernel = xxh3::best();
  const std::uint64_t rounds_bytes =
      size <= xxh3::short_bytes_max ? 0 : xxh3::rounds_before_finish(size) * xxh3::round_bytes;
  const std::uint64_t piece_max = std::max<std::uint64_t>(
      alignment, std::min(piece_bytes, ring_bytes_ / pieces_min) / alignment * alignment);
  while (payload_.done < rounds_bytes) {
    const std::uint64_t here = position_ + payload_.done;
    const std::uint64_t piece =
        std::min({piece_max, rounds_bytes - payload_.done, until_end(here, ring_bytes_)});
    if (wait_for_room(memory, here + piece, wait_us) != Status::done) return Status::waiting;
    copy_rounds(kernel, Stores::cached, payload_.lanes, at(memory, here, ring_bytes_), source + payload_.done,
                piece / xxh3::round_bytes);
    payload_.done += piece;
    if (advance(memory, here + piece) == Status::wake) return Status::wake;
  }
  const std::uint64_t trailer = trailer_of(position_, size);
  if (wait_for_room(memory, trailer + trailer_bytes, wait_us) != Status::done) return Status::waiting;
  if (size != payload_.done) {
    std::memcpy(at(memory, position_ + payload_.done, ring_bytes_), source + payload_.done, size - payload_.done);
  }
  checksum = rounds_bytes == 0 && size <= xxh3::short_bytes_max
                 ? xxh3::hash_short(source, size)
                 : xxh3::finish(payload_.lanes, source, size, payload_.done);
  const std::uint64_t mark = position_ ^ label;
  std::memcpy(at(memory, trailer, ring_bytes_), &checksum, 8);
  std::memcpy(at(memory, trailer + 8, ring_bytes_), &mark, 8);
  position_ = trailer + trailer_bytes;
  begun_ = false;
  // The payload is whole: whoever is told to wake the taker has nothing more to give of it.
  return advance(memory, position_);
}

void Taker::awake(std::uint8_t* memory) const {
  word<std::uint32_t>(memory, taker_sleeps_at).store(0, std::memory_order_relaxed);
}

Status Taker::wait_for_bytes(std::uint8_t* memory, std::uint64_t end, Share& share, std::uint64_t& staged) const {
  const auto are_there = [&] {
    staged = load(memory, staged_at, std::memory_order_acquire);
    return staged >= end;
  };
  if (are_there()) return Status::done;
  const Clock::time_point since = Clock::now();
  const bool came = spin(std::min(share.idle_us, share.idle_us_left), are_there);
  share.idle_us_left -= std::min(share.idle_us_left, elapsed_us(since));
  if (!came) {
    auto sleeps = word<std::uint32_t>(memory, taker_sleeps_at);
    sleeps.store(1, std::memory_order_seq_cst);
    staged = word<std::uint64_t>(memory, staged_at).load(std::memory_order_seq_cst);
    if (staged < end) return Status::waiting;
    sleeps.store(0, std::memory_order_relaxed);
  }
  return Status::done;
}

void Taker::advance(std::uint8_t* memory, std::uint64_t position) const {
  word<std::uint64_t>(memory, taken_at).store(position, std::memory_order_seq_cst);
  auto waits = word<std::uint32_t>(memory, giver_waits_at);
  if (waits.load(std::memory_order_seq_cst) != 0) {
    waits.store(0, std::memory_order_relaxed);
    futex_wake(memory, giver_waits_at);
  }
}

Status Taker::take(std::uint8_t* memory, std::uint8_t* destination, std::uint64_t size, std::uint64_t label,
                   Share& share, Taken& taken) {
  if (!begun_) {
    position_ = aligned(position_, alignment);
    payload_ = {.size = size};
    begun_ = true;
  }
  const xxh3::Kernel& kernel = xxh3::best();
  const std::uint64_t rounds_bytes =
      size <= xxh3::short_bytes_max ? 0 : xxh3::rounds_before_finish(size) * xxh3::round_bytes;
  std::uint64_t staged = 0;
  while (payload_.done < rounds_bytes) {
    const std::uint64_t here = position_ + payload_.done;
    if (share.bytes < alignment) return Status::slice;
    if (wait_for_bytes(memory, here + alignment, share, staged) != Status::done) return Status::waiting;
    if (staged - here > ring_bytes_) return Status::broken;
    std::uint64_t piece = std::min({piece_bytes, staged - here, share.bytes, until_end(here, ring_bytes_)});
    piece = std::min(piece, rounds_bytes - payload_.done) / alignment * alignment;
    if (destination != nullptr) {
      copy_rounds(kernel, Stores::streamed, payload_.lanes, destination + payload_.done,
                  at(memory, here, ring_bytes_), piece / xxh3::round_bytes);
    }
    payload_.done += piece;
    share.bytes -= piece;
    advance(memory, here + piece);
  }
  const std::uint64_t trailer = trailer_of(position_, size);
  if (wait_for_bytes(memory, trailer + trailer_bytes, share, staged) != Status::done) return Status::waiting;
  if (staged - (position_ + payload_.done) > ring_bytes_) return Status::broken;
  std::uint64_t mark = 0;
  std::memcpy(&taken.declared, at(memory, trailer, ring_bytes_), 8);
  std::memcpy(&mark, at(memory, trailer + 8, ring_bytes_), 8);
  if (mark != (position_ ^ label)) return Status::broken;
  if (destination == nullptr) {
    taken.seen = taken.declared;
  } else {
    if (size != payload_.done) {
      std::memcpy(destination + payload_.done, at(memory, position_ + payload_.done, ring_bytes_),
                  size - payload_.done);
    }
    taken.seen = size <= xxh3::short_bytes_max ? xxh3::hash_short(destination, size)
                                               : xxh3::finish(payload_.lanes, destination, size, payload_.done);
  }
  position_ = trailer + trailer_bytes;
  begun_ = false;
  advance(memory, position_);
  return Status::done;
}

}  // namespace kvtier::ring
