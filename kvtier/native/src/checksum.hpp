// XXH3-64 with seed 0 and the default secret, written from the public specification (xxHash fast digest algorithm 0.2.0).
// What must not live here: Python, copying.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvtier::xxh3 {

inline constexpr std::size_t stripe_bytes = 64;
inline constexpr std::size_t round_bytes = 1024;  // 16 stripes, then a scramble
inline constexpr std::size_t short_bytes_max = 240;
inline constexpr std::size_t streamed_alignment = 16;

using Lanes = std::array<std::uint64_t, 8>;

// The two loops that take all the time, once per instruction set. Any alignment.
struct Kernel {
  const char* name;
  // Mixes whole rounds into the lanes.
  void (*rounds)(Lanes& lanes, const std::uint8_t* data, std::size_t rounds_count);
  // The same, and copies them: every byte is loaded once and goes from the register to both, so what is hashed is what
  // is stored, whatever a concurrent writer does to the source. Stores past the caches; `destination` must be a multiple
  // of streamed_alignment. (Any alignment by way of a buffer was tried: on some stack addresses it ran at half the speed,
  // because the buffer's loads waited behind the streamed stores.) Null where the kernel has none.
  void (*rounds_streamed)(Lanes& lanes, std::uint8_t* destination, const std::uint8_t* source,
                          std::size_t rounds_count);
  // The same through the caches, any alignment: for what another core reads at once. Null where the kernel has none.
  void (*rounds_copied)(Lanes& lanes, std::uint8_t* destination, const std::uint8_t* source, std::size_t rounds_count);
};

extern const Kernel portable;
const Kernel* avx2();    // null where this processor lacks it
const Kernel* avx512();  // null where this processor lacks it

const Kernel& best();
const Kernel* find(std::string_view name);  // null where there is no such kernel on this processor; "best" is one

extern const std::array<std::uint8_t, 192> secret;

Lanes initial_lanes();

// Takes what follows the whole rounds: `data` is the entire input of `size` > short_bytes_max bytes, of which `done` bytes
// (all whole rounds but a last full one) are in the lanes.
std::uint64_t finish(Lanes& lanes, const std::uint8_t* data, std::size_t size, std::size_t done);

std::uint64_t hash_short(const std::uint8_t* data, std::size_t size);  // size <= short_bytes_max

std::uint64_t hash(const Kernel& kernel, const std::uint8_t* data, std::size_t size);

// Whole rounds that go before finish(): the last round, even a full one, is the finish's.
inline std::size_t rounds_before_finish(std::size_t size) { return (size - 1) / round_bytes; }

}  // namespace kvtier::xxh3

namespace kvtier {

const xxh3::Kernel& checksum_kernel(const char* path);  // a ValueError where there is no such one

}  // namespace kvtier
