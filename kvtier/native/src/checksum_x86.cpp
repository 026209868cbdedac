// The XXH3 loops with AVX2 and AVX-512, chosen at run time.
#include "checksum.hpp"
#include "cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier::xxh3 {

#if defined(__x86_64__)

namespace {

#define KVTIER_AVX2 __attribute__((target("avx2")))
#define KVTIER_AVX512 __attribute__((target("avx512f,avx512bw")))

constexpr int stripes_per_round = 16;
constexpr int multiplier = static_cast<int>(0x9E3779B1U);

// What is known of a destination's address, for stores past the caches; `cached` ones bear any.
enum class Aligned { to_vector, to_16, cached };

KVTIER_AVX512 inline __m512i mixed(__m512i lanes, __m512i words, __m512i key) {
  const __m512i keyed = _mm512_xor_si512(words, key);
  const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
  const __m512i swapped = _mm512_shuffle_epi32(words, _MM_PERM_BADC);
  return _mm512_add_epi64(lanes, _mm512_add_epi64(product, swapped));
}

KVTIER_AVX512 inline __m512i scrambled(__m512i lanes, __m512i key) {
  const __m512i keyed = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), key);
  const __m512i prime = _mm512_set1_epi32(multiplier);
  const __m512i low = _mm512_mul_epu32(keyed, prime);
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(keyed, 32), prime);
  return _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
}

KVTIER_AVX512 inline __m512i key512(std::size_t offset) { return _mm512_loadu_si512(secret.data() + offset); }

KVTIER_AVX512 void rounds_avx512(Lanes& result, const std::uint8_t* data, std::size_t rounds_count) {
  __m512i lanes = _mm512_loadu_si512(result.data());
  for (std::size_t round = 0; round < rounds_count; ++round) {
#pragma GCC unroll 16
    for (int n = 0; n < stripes_per_round; ++n) {
      lanes = mixed(lanes, _mm512_loadu_si512(data + 64 * n), key512(static_cast<std::size_t>(8 * n)));
    }
    lanes = scrambled(lanes, key512(secret.size() - stripe_bytes));
    data += round_bytes;
  }
  _mm512_storeu_si512(result.data(), lanes);
}

template <Aligned aligned>
KVTIER_AVX512 inline void put(std::uint8_t* to, __m512i words) {
  if constexpr (aligned == Aligned::to_vector) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), words);
  } else if constexpr (aligned == Aligned::cached) {
    _mm512_storeu_si512(to, words);
  } else {  // the four parts meet again in the write-combining buffer
    auto* parts = reinterpret_cast<__m128i*>(to);
    _mm_stream_si128(parts, _mm512_castsi512_si128(words));
    _mm_stream_si128(parts + 1, _mm512_extracti32x4_epi32(words, 1));
    _mm_stream_si128(parts + 2, _mm512_extracti32x4_epi32(words, 2));
    _mm_stream_si128(parts + 3, _mm512_extracti32x4_epi32(words, 3));
  }
}

template <Aligned aligned>
KVTIER_AVX512 void copy_rounds_avx512(Lanes& result, std::uint8_t* destination, const std::uint8_t* source,
                                        std::size_t rounds_count) {
  __m512i lanes = _mm512_loadu_si512(result.data());
  for (std::size_t round = 0; round < rounds_count; ++round) {
#pragma GCC unroll 16
    for (int n = 0; n < stripes_per_round; ++n) {
      const __m512i words = _mm512_loadu_si512(source + 64 * n);
      put<aligned>(destination + 64 * n, words);
      lanes = mixed(lanes, words, key512(static_cast<std::size_t>(8 * n)));
    }
    lanes = scrambled(lanes, key512(secret.size() - stripe_bytes));
    source += round_bytes;
    destination += round_bytes;
  }
  if constexpr (aligned != Aligned::cached) _mm_sfence();  // else not ordered with later ones that publish the block
  _mm512_storeu_si512(result.data(), lanes);
}

void rounds_streamed_avx512(Lanes& lanes, std::uint8_t* destination, const std::uint8_t* source,
                            std::size_t rounds_count) {
  const bool whole = reinterpret_cast<std::uintptr_t>(destination) % 64 == 0;
  const auto run = whole ? copy_rounds_avx512<Aligned::to_vector> : copy_rounds_avx512<Aligned::to_16>;
  run(lanes, destination, source, rounds_count);
}

KVTIER_AVX2 inline __m256i mixed(__m256i lanes, __m256i words, __m256i key) {
  const __m256i keyed = _mm256_xor_si256(words, key);
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

KVTIER_AVX2 inline __m256i scrambled(__m256i lanes, __m256i key) {
  const __m256i keyed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), key);
  const __m256i prime = _mm256_set1_epi32(multiplier);
  const __m256i low = _mm256_mul_epu32(keyed, prime);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
  return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

KVTIER_AVX2 inline __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

KVTIER_AVX2 void rounds_avx2(Lanes& result, const std::uint8_t* data, std::size_t rounds_count) {
  __m256i low = load256(result.data());
  __m256i high = load256(result.data() + 4);
  for (std::size_t round = 0; round < rounds_count; ++round) {
#pragma GCC unroll 16
    for (int n = 0; n < stripes_per_round; ++n) {
      low = mixed(low, load256(data + 64 * n), load256(secret.data() + 8 * n));
      high = mixed(high, load256(data + 64 * n + 32), load256(secret.data() + 8 * n + 32));
    }
    const std::uint8_t* key = secret.data() + secret.size() - stripe_bytes;
    low = scrambled(low, load256(key));
    high = scrambled(high, load256(key + 32));
    data += round_bytes;
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(result.data()), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(result.data() + 4), high);
}

template <Aligned aligned>
KVTIER_AVX2 inline void put(std::uint8_t* to, __m256i words) {
  if constexpr (aligned == Aligned::to_vector) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), words);
  } else if constexpr (aligned == Aligned::cached) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
  } else {
    auto* parts = reinterpret_cast<__m128i*>(to);
    _mm_stream_si128(parts, _mm256_castsi256_si128(words));
    _mm_stream_si128(parts + 1, _mm256_extracti128_si256(words, 1));
  }
}

template <Aligned aligned>
KVTIER_AVX2 void copy_rounds_avx2(Lanes& result, std::uint8_t* destination, const std::uint8_t* source,
                                    std::size_t rounds_count) {
  __m256i low = load256(result.data());
  __m256i high = load256(result.data() + 4);
  for (std::size_t round = 0; round < rounds_count; ++round) {
#pragma GCC unroll 16
    for (int n = 0; n < stripes_per_round; ++n) {
      const __m256i first = load256(source + 64 * n);
      const __m256i second = load256(source + 64 * n + 32);
      put<aligned>(destination + 64 * n, first);
      put<aligned>(destination + 64 * n + 32, second);
      low = mixed(low, first, load256(secret.data() + 8 * n));
      high = mixed(high, second, load256(secret.data() + 8 * n + 32));
    }
    const std::uint8_t* key = secret.data() + secret.size() - stripe_bytes;
    low = scrambled(low, load256(key));
    high = scrambled(high, load256(key + 32));
    source += round_bytes;
    destination += round_bytes;
  }
  if constexpr (aligned != Aligned::cached) _mm_sfence();
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(result.data()), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(result.data() + 4), high);
}

void rounds_streamed_avx2(Lanes& lanes, std::uint8_t* destination, const std::uint8_t* source,
                          std::size_t rounds_count) {
  const bool whole = reinterpret_cast<std::uintptr_t>(destination) % 32 == 0;
  const auto run = whole ? copy_rounds_avx2<Aligned::to_vector> : copy_rounds_avx2<Aligned::to_16>;
  run(lanes, destination, source, rounds_count);
}

constexpr Kernel avx2_kernel{"avx2", rounds_avx2, rounds_streamed_avx2, copy_rounds_avx2<Aligned::cached>};
constexpr Kernel avx512_kernel{"avx512", rounds_avx512, rounds_streamed_avx512,
                               copy_rounds_avx512<Aligned::cached>};

}  // namespace

const Kernel* avx2() { return cpu_has_avx2() ? &avx2_kernel : nullptr; }
const Kernel* avx512() { return cpu_has_avx512() ? &avx512_kernel : nullptr; }

#else

const Kernel* avx2() { return nullptr; }
const Kernel* avx512() { return nullptr; }

#endif

}  // namespace kvtier::xxh3
