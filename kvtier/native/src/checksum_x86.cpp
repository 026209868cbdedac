// The XXH3 loops with AVX2 and AVX-512, chosen at run time.
#include "checksum.hpp"
#include "cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#endif

namespace kvtier::xxh3 {

#if defined(__x86_64__)

namespace {

#define KVTIER_AVX2 __attribute__((target("avx2")))
#define KVTIER_AVX512 __attribute__((target("avx512f,avx512bw")))

constexpr int stripes_per_round = 16;
constexpr int multiplier = static_cast<int>(0x9E3779B1U);

// Gathers rounds into whole cache lines of the destination, whatever its alignment, so that they can be stored past the
// caches. A line is 64 bytes; up to 63 bytes are carried from one round to the next.
class LineStage {
 public:
  explicit LineStage(std::uint8_t* destination)
      : destination_(destination), carried_(reinterpret_cast<std::uintptr_t>(destination) % line_bytes) {}

  std::uint8_t* slot() { return staged_ + carried_; }  // takes the next round

  struct Lines {
    std::uint8_t* to;
    const std::uint8_t* from;
    std::size_t count;
  };

  // After a round was put into the slot: the lines that are whole now.
  Lines whole_lines() {
    if (written_ != 0 || carried_ == 0) return {destination_ + written_, staged_, round_bytes / line_bytes};
    const std::size_t head = line_bytes - carried_;  // the destination's first bytes, which share a line with others
    std::memcpy(destination_, slot(), head);
    return {destination_ + head, staged_ + line_bytes, round_bytes / line_bytes - 1};
  }

  void written(const Lines& lines) {
    written_ = static_cast<std::size_t>(lines.to - destination_) + lines.count * line_bytes;
    std::memcpy(staged_, staged_ + round_bytes, line_bytes);
  }

  void finish() const { std::memcpy(destination_ + written_, staged_, carried_); }

 private:
  static constexpr std::size_t line_bytes = 64;

  std::uint8_t* destination_;
  std::size_t carried_;
  std::size_t written_ = 0;
  alignas(line_bytes) std::uint8_t staged_[round_bytes + line_bytes];
};

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

KVTIER_AVX512 void rounds_streamed_avx512(Lanes& result, std::uint8_t* destination, const std::uint8_t* source,
                                          std::size_t rounds_count) {
  LineStage stage(destination);
  __m512i lanes = _mm512_loadu_si512(result.data());
  for (std::size_t round = 0; round < rounds_count; ++round) {
    std::uint8_t* slot = stage.slot();
#pragma GCC unroll 16
    for (int n = 0; n < stripes_per_round; ++n) {
      const __m512i words = _mm512_loadu_si512(source + 64 * n);
      _mm512_storeu_si512(slot + 64 * n, words);
      lanes = mixed(lanes, words, key512(static_cast<std::size_t>(8 * n)));
    }
    lanes = scrambled(lanes, key512(secret.size() - stripe_bytes));
    source += round_bytes;
    const LineStage::Lines lines = stage.whole_lines();
    for (std::size_t i = 0; i < lines.count; ++i) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(lines.to + 64 * i), _mm512_load_si512(lines.from + 64 * i));
    }
    stage.written(lines);
  }
  stage.finish();
  _mm_sfence();  // streamed stores are not ordered with later ones that publish the block
  _mm512_storeu_si512(result.data(), lanes);
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

KVTIER_AVX2 void rounds_streamed_avx2(Lanes& result, std::uint8_t* destination, const std::uint8_t* source,
                                      std::size_t rounds_count) {
  LineStage stage(destination);
  __m256i low = load256(result.data());
  __m256i high = load256(result.data() + 4);
  for (std::size_t round = 0; round < rounds_count; ++round) {
    std::uint8_t* slot = stage.slot();
#pragma GCC unroll 16
    for (int n = 0; n < stripes_per_round; ++n) {
      const __m256i first = load256(source + 64 * n);
      const __m256i second = load256(source + 64 * n + 32);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(slot + 64 * n), first);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(slot + 64 * n + 32), second);
      low = mixed(low, first, load256(secret.data() + 8 * n));
      high = mixed(high, second, load256(secret.data() + 8 * n + 32));
    }
    const std::uint8_t* key = secret.data() + secret.size() - stripe_bytes;
    low = scrambled(low, load256(key));
    high = scrambled(high, load256(key + 32));
    source += round_bytes;
    const LineStage::Lines lines = stage.whole_lines();
    for (std::size_t i = 0; i < 2 * lines.count; ++i) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(lines.to + 32 * i), load256(lines.from + 32 * i));
    }
    stage.written(lines);
  }
  stage.finish();
  _mm_sfence();
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(result.data()), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(result.data() + 4), high);
}

constexpr Kernel avx2_kernel{"avx2", rounds_avx2, rounds_streamed_avx2};
constexpr Kernel avx512_kernel{"avx512", rounds_avx512, rounds_streamed_avx512};

}  // namespace

const Kernel* avx2() { return cpu_has_avx2() ? &avx2_kernel : nullptr; }
const Kernel* avx512() { return cpu_has_avx512() ? &avx512_kernel : nullptr; }

#else

const Kernel* avx2() { return nullptr; }
const Kernel* avx512() { return nullptr; }

#endif

}  // namespace kvtier::xxh3
