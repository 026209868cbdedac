// Copies of block bytes, verified: what is hashed is what was stored, in one pass over the memory.
// What must not live here: Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checksum.hpp"

namespace kvtier {

enum class Stores { cached, streamed };

// A call that moves more than this does not leave its result in the caches: storing past them saves reading the
// destination's lines first, and leaves the caches to others. Destinations that are not 16-byte aligned do without.
inline constexpr std::size_t streamed_bytes_min = 256 * 1024;

inline Stores stores_for(std::size_t call_bytes) {
  return call_bytes >= streamed_bytes_min ? Stores::streamed : Stores::cached;
}

// Copies `size` bytes and returns the XXH3-64 of what now stands in the destination. The source may be written meanwhile:
// every byte of it is read once. The areas must not overlap.
std::uint64_t copy_checksum(const xxh3::Kernel& kernel, Stores stores, std::uint8_t* destination,
                            const std::uint8_t* source, std::size_t size);

// Copies whole rounds and mixes what is stored into the lanes. Streamed stores are fenced; a destination that is not aligned
// for them is stored through the caches.
void copy_rounds(const xxh3::Kernel& kernel, Stores stores, xxh3::Lanes& lanes, std::uint8_t* destination,
                 const std::uint8_t* source, std::size_t rounds_count);

struct Copy {
  std::uint8_t* destination;
  const std::uint8_t* source;
  std::size_t size;
};

// Runs all copies on up to `threads` threads and writes their checksums, in order.
void copy_checksum_all(const xxh3::Kernel& kernel, const Copy* copies, std::size_t count, std::size_t threads,
                       std::uint64_t* checksums);

}  // namespace kvtier
