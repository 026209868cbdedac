#include "arena.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "checksum.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier::arena {

// Memory order. All of the directory is 64-bit words that are only touched as relaxed atomics; what orders them are the
// generation of an entry (odd: being changed) and these fences.
//
//   writer, per entry                            reader
//     W1 generation := odd        relaxed          R1 g := generation          acquire; odd: miss
//     W2 release fence, and sfence                 R2 hash, slot, frame header relaxed
//     W3 words of the entry       relaxed          R3 copy of the slot, hashed as it is copied
//     W4 generation := even       release          R4 acquire fence
//     ... the slot is free; later writes to it     R5 generation still g, else miss
//
// R1 reads from W4, so R2 and R3 see the entry and the slot as published (the slot was written, and its streamed stores
// fenced, before W4). If R3 saw a byte of a later use of the slot, then that write came after a W2, and R4 makes R5 see
// that W1 or a later one. The slot's bytes are copied while they may be written: no data race of the language's is
// avoidable there, which is why the checksum is taken over the private copy.
namespace {

constexpr std::uint64_t magic = 0x414e45524154564bULL;  // "KVTARENA"
constexpr std::size_t frame_at = 32;

std::uint64_t load(const std::uint8_t* at, std::memory_order order = std::memory_order_relaxed) {
  // atomic_ref of const objects is C++26; nothing is written.
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(const_cast<std::uint8_t*>(at))).load(order);
}

void store(std::uint8_t* at, std::uint64_t value, std::memory_order order = std::memory_order_relaxed) {
  std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(at)).store(value, order);
}

std::uint64_t load_plain(const std::uint8_t* at) {
  std::uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Orders the writer's words before whatever it stores next, streamed stores included, which a plain fence may not.
void writer_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

HeaderFault read_geometry(const std::uint8_t* directory, std::size_t directory_bytes, Geometry& geometry) {
  if (directory_bytes < header_bytes) return HeaderFault::small;
  if (load(directory) != magic) return HeaderFault::magic;
  const std::uint64_t versions = load(directory + 8);
  if ((versions & UINT32_MAX) != abi_version || versions >> 32 != entry_bytes) return HeaderFault::abi;
  geometry.epoch = load(directory + 16);
  geometry.is_serving = load(directory + 24, std::memory_order_acquire) == 1;
  geometry.entries_count = load(directory + 32);
  geometry.buckets_count = load(directory + 40);
  geometry.slots_bytes = load(directory + 48);
  const std::uint64_t buckets = geometry.buckets_count;
  if (geometry.entries_count == 0 || geometry.entries_count > entries_count_max) return HeaderFault::counts;
  if (buckets < 2 * geometry.entries_count || buckets > 8 * entries_count_max || (buckets & (buckets - 1)) != 0) {
    return HeaderFault::counts;
  }
  const std::uint64_t needed = header_bytes + 8 * buckets + entry_bytes * geometry.entries_count;
  return directory_bytes < needed ? HeaderFault::small : HeaderFault::none;
}

std::uint64_t Directory::hash(const std::uint8_t* name) const {
  std::array<std::uint8_t, 8 + name_bytes> seeded;
  std::memcpy(seeded.data(), &geometry_.epoch, 8);
  std::memcpy(seeded.data() + 8, name, name_bytes);
  return xxh3::hash_short(seeded.data(), seeded.size());
}

Found Directory::find(const std::uint8_t* name) const {
  const std::uint64_t wanted = hash(name);
  const std::uint64_t mask = geometry_.buckets_count - 1;
  const std::uint64_t probes = std::min<std::uint64_t>(geometry_.buckets_count, probes_max);
  Found found;
  for (std::uint64_t i = 0; i < probes; ++i) {
    const std::uint64_t word = load(bucket((wanted + i) & mask), std::memory_order_acquire);
    if (word == 0) return found;
    const std::uint64_t entry = (word & UINT32_MAX) - 1;
    if (word >> 32 != wanted >> 32 || entry >= geometry_.entries_count) continue;
    const std::uint8_t* at = entry_at(entry);
    found.generation = load(at, std::memory_order_acquire);
    if (found.generation % 2 != 0) return found;  // being changed: a miss
    if (load(at + 8) != wanted) continue;
    found.slot_offset = load(at + 16);
    for (std::size_t n = 0; n < found.frame.size(); ++n) found.frame[n] = load(at + frame_at + 8 * n);
    found.entry = entry;
    if (!is_unchanged(found)) found.entry = nowhere;
    return found;
  }
  return found;
}

bool Directory::is_unchanged(const Found& found) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  return load(entry_at(found.entry)) == found.generation;
}

namespace {

std::uint64_t header_checksum(const FrameHeader& frame) {
  return xxh3::hash_short(reinterpret_cast<const std::uint8_t*>(frame.data()), frame_bytes - 8);
}

FrameHeader frame_of(const std::uint8_t* name, const Block& block) {
  FrameHeader frame{};
  std::memcpy(frame.data(), name, name_bytes);
  frame[writer_word] = block.writer_id;
  frame[payload_bytes_word] = block.payload_bytes;
  frame[payload_checksum_word] = block.payload_checksum;
  frame[header_checksum_word] = header_checksum(frame);
  return frame;
}

}  // namespace

bool Directory::publish(const std::uint8_t* name, const Block& block) {
  const std::uint64_t hashed = hash(name);
  const FrameHeader frame = frame_of(name, block);
  const std::uint64_t mask = geometry_.buckets_count - 1;
  const std::uint64_t probes = std::min<std::uint64_t>(geometry_.buckets_count, probes_max);
  std::uint64_t i = 0;
  while (i < probes && load(bucket((hashed + i) & mask)) != 0) ++i;
  if (i == probes) return false;
  std::uint8_t* at = entry_at(block.entry);
  const std::uint64_t before = load(at) & ~std::uint64_t{1};
  store(at, before + 1);
  writer_fence();  // also: the slot, written by this process, before the entry that names it
  store(at + 8, hashed);
  store(at + 16, block.slot_offset);
  store(at + 24, 0);
  for (std::size_t n = 0; n < frame_bytes / 8; ++n) store(at + frame_at + 8 * n, frame[n]);
  store(at, before + 2, std::memory_order_release);
  store(bucket((hashed + i) & mask), (hashed >> 32 << 32) | (block.entry + 1), std::memory_order_release);
  return true;
}

void Directory::remove(std::uint64_t entry, const std::uint8_t* name) {
  std::uint8_t* at = entry_at(entry);
  const std::uint64_t hashed = hash(name);  // not the entry's word: memory may have been damaged
  const std::uint64_t mask = geometry_.buckets_count - 1;
  const std::uint64_t word = (hashed >> 32 << 32) | (entry + 1);
  const std::uint64_t probes = std::min<std::uint64_t>(geometry_.buckets_count, probes_max);
  for (std::uint64_t i = 0; i < probes; ++i) {
    const std::uint64_t position = (hashed + i) & mask;
    if (load(bucket(position)) == word) {
      close_gap(position);
      break;
    }
  }
  const std::uint64_t before = load(at) & ~std::uint64_t{1};
  store(at, before + 1);
  writer_fence();
  store(at + 8, 0);
  store(at + 16, 0);
  for (std::size_t n = 0; n < frame_bytes / 8; ++n) store(at + frame_at + 8 * n, 0);
  store(at, before + 2, std::memory_order_release);
  writer_fence();  // before anything is written to the slot again
}

// Moves later words of the run up, so that no lookup has to step over what is gone. A reader meanwhile may miss a block
// that is there, and never finds one that is not: entries stay where they are.
void Directory::close_gap(std::uint64_t gap) {
  const std::uint64_t mask = geometry_.buckets_count - 1;
  for (std::uint64_t next = (gap + 1) & mask; next != gap; next = (next + 1) & mask) {
    const std::uint64_t word = load(bucket(next));
    if (word == 0) break;
    const std::uint64_t entry = (word & UINT32_MAX) - 1;
    const std::uint64_t home = entry < geometry_.entries_count ? load(entry_at(entry) + 8) & mask : next;
    if (((next - home) & mask) >= ((next - gap) & mask)) {
      store(bucket(gap), word, std::memory_order_release);
      gap = next;
    }
  }
  store(bucket(gap), 0, std::memory_order_release);
}

bool is_of_name(const FrameHeader& frame, const std::uint8_t* name) {
  for (std::size_t n = 0; n < name_bytes / 8; ++n) {
    if (n != writer_word && frame[n] != load_plain(name + 8 * n)) return false;
  }
  return frame[reserved_word] == 0 && frame[header_checksum_word] == header_checksum(frame);
}

std::uint64_t Directory::generation(std::uint64_t entry) const { return load(entry_at(entry)); }

}  // namespace kvtier::arena
