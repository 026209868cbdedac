#include "copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace kvtier {

namespace {

constexpr std::size_t cached_step_rounds = 4;  // 4 KiB: still in the first-level cache when it is hashed

// What was just stored is hashed, not the source.
void copy_rounds_cached(const xxh3::Kernel& kernel, xxh3::Lanes& lanes, std::uint8_t* destination,
                        const std::uint8_t* source, std::size_t rounds_count) {
  while (rounds_count != 0) {
    const std::size_t step = std::min(rounds_count, cached_step_rounds);
    std::memcpy(destination, source, step * xxh3::round_bytes);
    kernel.rounds(lanes, destination, step);
    destination += step * xxh3::round_bytes;
    source += step * xxh3::round_bytes;
    rounds_count -= step;
  }
}

}  // namespace

void copy_rounds(const xxh3::Kernel& kernel, Stores stores, xxh3::Lanes& lanes, std::uint8_t* destination,
                 const std::uint8_t* source, std::size_t rounds_count) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(destination) % xxh3::streamed_alignment == 0;
  if (stores == Stores::streamed && kernel.rounds_streamed != nullptr && aligned) {
    kernel.rounds_streamed(lanes, destination, source, rounds_count);
  } else if (kernel.rounds_copied != nullptr) {
    kernel.rounds_copied(lanes, destination, source, rounds_count);
  } else {
    copy_rounds_cached(kernel, lanes, destination, source, rounds_count);
  }
}

std::uint64_t copy_checksum(const xxh3::Kernel& kernel, Stores stores, std::uint8_t* destination,
                            const std::uint8_t* source, std::size_t size) {
  if (size <= xxh3::short_bytes_max) {
    if (size != 0) std::memcpy(destination, source, size);
    return xxh3::hash_short(destination, size);
  }
  const std::size_t rounds = xxh3::rounds_before_finish(size);
  const std::size_t done = rounds * xxh3::round_bytes;
  xxh3::Lanes lanes = xxh3::initial_lanes();
  copy_rounds(kernel, stores, lanes, destination, source, rounds);
  std::memcpy(destination + done, source + done, size - done);
  return xxh3::finish(lanes, destination, size, done);
}

void copy_checksum_all(const xxh3::Kernel& kernel, const Copy* copies, std::size_t count, std::size_t threads,
                       std::uint64_t* checksums) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) bytes += copies[i].size;
  const Stores stores = stores_for(bytes);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      checksums[i] = copy_checksum(kernel, stores, copies[i].destination, copies[i].source, copies[i].size);
    }
  };
  std::vector<std::thread> others;
  const std::size_t useful = std::min(threads, count);
  others.reserve(useful);
  try {
    while (others.size() + 1 < useful) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system has no more threads to give: those there are do all the work.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace kvtier
