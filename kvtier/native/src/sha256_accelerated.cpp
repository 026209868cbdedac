// The compression function with the processor's SHA instructions: x86 SHA-NI, ARMv8 SHA2.
#include "cpu.hpp"
#include "sha256.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvtier::sha256 {

#if defined(__x86_64__)

namespace {

#define KVTIER_SHA __attribute__((target("sha,ssse3,sse4.1")))

// The instructions keep the eight words as (A B E F) and (C D G H), each with its first word in the top lane.
KVTIER_SHA void compress_x86(State& state, const std::uint8_t* chunks, std::size_t count) {
  const __m128i bytes_swapped = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  const __m128i abcd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data()));
  const __m128i efgh = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4));
  const __m128i badc = _mm_shuffle_epi32(abcd, 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(efgh, 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);

  for (std::size_t n = 0; n < count; ++n) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    const auto* words = reinterpret_cast<const __m128i*>(chunks + n * chunk_bytes);
    __m128i w[4];  // a ring of the last sixteen message words
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128(words + i), bytes_swapped);
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {  // four rounds each
      const __m128i current = w[group % 4];
      const __m128i constants =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(round_constants.data() + 4 * group));
      __m128i sum = _mm_add_epi32(current, constants);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      sum = _mm_shuffle_epi32(sum, 0x0E);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, sum);
      if (group < 12) {  // the words that four groups later need
        const __m128i next = w[(group + 1) % 4];
        const __m128i last = w[(group + 3) % 4];
        const __m128i middle = _mm_alignr_epi8(last, w[(group + 2) % 4], 4);
        const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(current, next), middle);
        w[group % 4] = _mm_sha256msg2_epu32(partial, last);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace

Compress compress_accelerated() { return cpu_has_sha() ? compress_x86 : nullptr; }

#elif defined(__aarch64__)

namespace {

#if defined(__ARM_FEATURE_SHA2)
#define KVTIER_SHA  // the build's target has them, as on every Apple processor
#else
#define KVTIER_SHA __attribute__((target("+crypto")))
#endif

KVTIER_SHA void compress_arm(State& state, const std::uint8_t* chunks, std::size_t count) {
  uint32x4_t abcd = vld1q_u32(state.data());
  uint32x4_t efgh = vld1q_u32(state.data() + 4);
  for (std::size_t n = 0; n < count; ++n) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];
    for (std::size_t i = 0; i < 4; ++i) {
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(chunks + n * chunk_bytes + 16 * i)));
    }
    for (std::size_t group = 0; group < 16; ++group) {
      const uint32x4_t current = w[group % 4];
      const uint32x4_t sum = vaddq_u32(current, vld1q_u32(round_constants.data() + 4 * group));
      const uint32x4_t abcd_now = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_now, sum);
      if (group < 12) {
        const uint32x4_t partial = vsha256su0q_u32(current, w[(group + 1) % 4]);
        w[group % 4] = vsha256su1q_u32(partial, w[(group + 2) % 4], w[(group + 3) % 4]);
      }
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state.data(), abcd);
  vst1q_u32(state.data() + 4, efgh);
}

}  // namespace

Compress compress_accelerated() { return cpu_has_sha() ? compress_arm : nullptr; }

#else

Compress compress_accelerated() { return nullptr; }

#endif

}  // namespace kvtier::sha256
