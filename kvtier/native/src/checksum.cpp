#include "checksum.hpp"

#include <bit>
#include <cstring>

namespace kvtier::xxh3 {

const std::array<std::uint8_t, 192> secret{
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

namespace {

constexpr std::uint64_t prime32_1 = 0x9E3779B1U;
constexpr std::uint64_t prime32_2 = 0x85EBCA77U;
constexpr std::uint64_t prime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t prime64_1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t prime64_2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t prime64_3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t prime64_4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t prime64_5 = 0x27D4EB2F165667C5ULL;
constexpr std::uint64_t prime_mx1 = 0x165667919E3779F9ULL;
constexpr std::uint64_t prime_mx2 = 0x9FB21C651E98DF25ULL;

constexpr std::size_t stripes_per_round = round_bytes / stripe_bytes;

std::uint32_t load32(const std::uint8_t* from) {
  std::uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint64_t load64(const std::uint8_t* from) {
  std::uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint64_t secret64(std::size_t offset) { return load64(secret.data() + offset); }

__extension__ typedef unsigned __int128 Wide;

std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t x) {
  x = (x ^ (x >> 37)) * prime_mx1;
  return x ^ (x >> 32);
}

std::uint64_t avalanche_strong(std::uint64_t x) {
  x = (x ^ (x >> 33)) * prime64_2;
  x = (x ^ (x >> 29)) * prime64_3;
  return x ^ (x >> 32);
}

std::uint64_t hash_1_to_3(const std::uint8_t* data, std::size_t size) {
  const std::uint32_t combined = data[size - 1] | static_cast<std::uint32_t>(size) << 8 |
                                 static_cast<std::uint32_t>(data[0]) << 16 |
                                 static_cast<std::uint32_t>(data[size >> 1]) << 24;
  return avalanche_strong((load32(secret.data()) ^ load32(secret.data() + 4)) ^ std::uint64_t{combined});
}

std::uint64_t hash_4_to_8(const std::uint8_t* data, std::size_t size) {
  const std::uint64_t combined = load32(data + size - 4) | std::uint64_t{load32(data)} << 32;
  std::uint64_t value = (secret64(8) ^ secret64(16)) ^ combined;
  value ^= std::rotl(value, 49) ^ std::rotl(value, 24);
  value *= prime_mx2;
  value ^= (value >> 35) + size;
  value *= prime_mx2;
  return value ^ (value >> 28);
}

std::uint64_t hash_9_to_16(const std::uint8_t* data, std::size_t size) {
  const std::uint64_t low = (secret64(24) ^ secret64(32)) ^ load64(data);
  const std::uint64_t high = (secret64(40) ^ secret64(48)) ^ load64(data + size - 8);
  return avalanche(size + __builtin_bswap64(low) + high + fold_product(low, high));
}

std::uint64_t mix(const std::uint8_t* data, std::size_t secret_offset) {
  return fold_product(load64(data) ^ secret64(secret_offset), load64(data + 8) ^ secret64(secret_offset + 8));
}

std::uint64_t hash_17_to_128(const std::uint8_t* data, std::size_t size) {
  std::uint64_t sum = size * prime64_1;
  const std::size_t pairs = (size - 1) / 32 + 1;
  for (std::size_t i = 0; i < pairs; ++i) {
    sum += mix(data + 16 * i, 32 * i);
    sum += mix(data + size - 16 * i - 16, 32 * i + 16);
  }
  return avalanche(sum);
}

std::uint64_t hash_129_to_240(const std::uint8_t* data, std::size_t size) {
  std::uint64_t sum = size * prime64_1;
  for (std::size_t i = 0; i < 8; ++i) sum += mix(data + 16 * i, 16 * i);
  sum = avalanche(sum);
  for (std::size_t i = 8; i < size / 16; ++i) sum += mix(data + 16 * i, 16 * (i - 8) + 3);
  sum += mix(data + size - 16, 119);
  return avalanche(sum);
}

void mix_stripe(Lanes& lanes, const std::uint8_t* stripe, const std::uint8_t* key) {
  Lanes words;
  for (std::size_t i = 0; i < 8; ++i) words[i] = load64(stripe + 8 * i);
  for (std::size_t i = 0; i < 8; ++i) {
    const std::uint64_t keyed = words[i] ^ load64(key + 8 * i);
    lanes[i] += words[i ^ 1] + (keyed & 0xFFFFFFFFU) * (keyed >> 32);
  }
}

void scramble(Lanes& lanes) {
  const std::uint8_t* key = secret.data() + secret.size() - stripe_bytes;
  for (std::size_t i = 0; i < 8; ++i) {
    lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ load64(key + 8 * i)) * prime32_1;
  }
}

void rounds_portable(Lanes& result, const std::uint8_t* data, std::size_t rounds_count) {
  Lanes lanes = result;
  for (std::size_t round = 0; round < rounds_count; ++round) {
    for (std::size_t n = 0; n < stripes_per_round; ++n) mix_stripe(lanes, data + n * stripe_bytes, secret.data() + 8 * n);
    scramble(lanes);
    data += round_bytes;
  }
  result = lanes;
}

}  // namespace

const Kernel portable{"portable", rounds_portable, nullptr, nullptr};

const Kernel& best() {
  if (const Kernel* kernel = avx512()) return *kernel;
  if (const Kernel* kernel = avx2()) return *kernel;
  return portable;
}

const Kernel* find(std::string_view name) {
  if (name == "best") return &best();
  for (const Kernel* kernel : {avx512(), avx2(), &portable}) {
    if (kernel != nullptr && name == kernel->name) return kernel;
  }
  return nullptr;
}

Lanes initial_lanes() {
  return {prime32_3, prime64_1, prime64_2, prime64_3, prime64_4, prime32_2, prime64_5, prime32_1};
}

std::uint64_t finish(Lanes& lanes, const std::uint8_t* data, std::size_t size, std::size_t done) {
  const std::size_t stripes = (size - done - 1) / stripe_bytes;
  for (std::size_t n = 0; n < stripes; ++n) mix_stripe(lanes, data + done + n * stripe_bytes, secret.data() + 8 * n);
  mix_stripe(lanes, data + size - stripe_bytes, secret.data() + secret.size() - stripe_bytes - 7);
  std::uint64_t sum = size * prime64_1;
  for (std::size_t i = 0; i < 4; ++i) {
    sum += fold_product(lanes[2 * i] ^ secret64(11 + 16 * i), lanes[2 * i + 1] ^ secret64(19 + 16 * i));
  }
  return avalanche(sum);
}

std::uint64_t hash_short(const std::uint8_t* data, std::size_t size) {
  if (size > 128) return hash_129_to_240(data, size);
  if (size > 16) return hash_17_to_128(data, size);
  if (size > 8) return hash_9_to_16(data, size);
  if (size > 3) return hash_4_to_8(data, size);
  if (size > 0) return hash_1_to_3(data, size);
  return avalanche_strong(secret64(56) ^ secret64(64));
}

std::uint64_t hash(const Kernel& kernel, const std::uint8_t* data, std::size_t size) {
  if (size <= short_bytes_max) return hash_short(data, size);
  const std::size_t rounds = rounds_before_finish(size);
  Lanes lanes = initial_lanes();
  kernel.rounds(lanes, data, rounds);
  return finish(lanes, data, size, rounds * round_bytes);
}

}  // namespace kvtier::xxh3
