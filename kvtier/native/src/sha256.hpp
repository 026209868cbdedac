// SHA-256 (FIPS 180-4), with the processor's SHA instructions where it has them.
// What must not live here: anything about blocks, tokens or Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvtier::sha256 {

inline constexpr std::size_t digest_bytes = 32;
inline constexpr std::size_t chunk_bytes = 64;

using State = std::array<std::uint32_t, 8>;

// Mixes `count` chunks of 64 bytes (any alignment) into the state.
using Compress = void (*)(State& state, const std::uint8_t* chunks, std::size_t count);

extern const std::array<std::uint32_t, 64> round_constants;

void compress_portable(State& state, const std::uint8_t* chunks, std::size_t count);
Compress compress_accelerated();  // null where this processor has no SHA instructions

class Hasher {
 public:
  explicit Hasher(Compress compress) : compress_(compress) {}

  void update(const std::uint8_t* data, std::size_t size) {
    total_ += size;
    if (filled_ + size < chunk_bytes) {
      append(data, size);
      return;
    }
    if (filled_ != 0) {
      const std::size_t head = chunk_bytes - filled_;
      append(data, head);
      compress_(state_, chunk_.data(), 1);
      data += head;
      size -= head;
    }
    const std::size_t whole = size / chunk_bytes;
    if (whole != 0) compress_(state_, data, whole);
    filled_ = 0;
    append(data + whole * chunk_bytes, size % chunk_bytes);
  }

  // Writes the digest and leaves the hasher ready for another message.
  void finish(std::uint8_t* digest);

 private:
  static constexpr State initial{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

  void append(const std::uint8_t* data, std::size_t size) {
    if (size != 0) std::memcpy(chunk_.data() + filled_, data, size);
    filled_ += size;
  }

  Compress compress_;
  State state_ = initial;
  std::uint64_t total_ = 0;
  std::size_t filled_ = 0;
  alignas(64) std::array<std::uint8_t, chunk_bytes> chunk_{};
};

}  // namespace kvtier::sha256
