#include "prefix_index_table.hpp"

#include <bit>
#include <cassert>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvtier::index {

namespace {

constexpr std::uint8_t EMPTY = 0x80;
constexpr std::uint8_t GONE = 0xFE;
constexpr std::size_t GROUPS_MAX = std::size_t{1} << 24;

// Bit i is set where tags[i] == tag, for 16 tags.
inline std::uint32_t matches(const std::uint8_t* tags, std::uint8_t tag) {
#if defined(__SSE2__)
  const __m128i group = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
  return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(group, _mm_set1_epi8(static_cast<char>(tag)))));
#else
  std::uint32_t found = 0;
  for (std::uint32_t i = 0; i < 16; ++i) found |= static_cast<std::uint32_t>(tags[i] == tag) << i;
  return found;
#endif
}

// Bit i is set where tags[i] is not full: empty or gone.
inline std::uint32_t vacancies(const std::uint8_t* tags) {
#if defined(__SSE2__)
  return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(tags))));
#else
  std::uint32_t found = 0;
  for (std::uint32_t i = 0; i < 16; ++i) found |= static_cast<std::uint32_t>(tags[i] >> 7) << i;
  return found;
#endif
}

inline std::uint8_t tag_of(std::uint64_t mixed) { return static_cast<std::uint8_t>(mixed >> 8 & 0x7F); }

}  // namespace

Table::Table(Memory& memory, const Pages& pages, std::uint64_t seed) : pages_(pages), seed_(seed) {
  for (std::size_t groups = 1; groups <= GROUPS_MAX; groups = std::max(groups + 1, groups * 9 / 8)) {
    class_groups_.push_back(static_cast<std::uint32_t>(groups));
    pools_.emplace_back(memory, groups * GROUP * (1 + sizeof(Position)) + GROUP, PARTS + 1);  // keeps tags aligned
  }
}

std::uint64_t Table::mix(std::uint64_t hash) const {
  std::uint64_t x = (hash ^ seed_) * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  return x ^ x >> 32;
}

std::uint32_t Table::group_of(std::uint64_t mixed, std::uint32_t groups) {
  return static_cast<std::uint32_t>((mixed >> 32) * groups >> 32);
}

Position* Table::positions(const Part& part) {
  return reinterpret_cast<Position*>(part.record + std::size_t{part.groups} * GROUP);
}

std::uint32_t* Table::owner(std::uint32_t size_class, std::uint32_t index) {
  const std::size_t slots = std::size_t{class_groups_[size_class]} * GROUP;
  return reinterpret_cast<std::uint32_t*>(pools_[size_class].at(index) + slots * (1 + sizeof(Position)));
}

Position Table::find(std::uint64_t hash) const {
  const std::uint64_t mixed = mix(hash);
  const Part& part = parts_[mixed % PARTS];
  if (part.full == 0) return NONE;
  const std::uint8_t tag = tag_of(mixed);
  const Position* const at = positions(part);
  for (std::uint32_t group = group_of(mixed, part.groups);;) {
    const std::uint8_t* const tags = part.record + std::size_t{group} * GROUP;
    for (std::uint32_t found = matches(tags, tag); found != 0; found &= found - 1) {
      const Position candidate = at[group * GROUP + static_cast<std::uint32_t>(std::countr_zero(found))];
      if (pages_.hash_at(candidate) == hash) return candidate;
    }
    if (matches(tags, EMPTY) != 0) return NONE;
    if (++group == part.groups) group = 0;
  }
}

void Table::prefetch(std::uint64_t hash) const {
  const std::uint64_t mixed = mix(hash);
  const Part& part = parts_[mixed % PARTS];
  const std::size_t group = group_of(mixed, part.groups);
  __builtin_prefetch(part.record + group * GROUP);
  __builtin_prefetch(positions(part) + group * GROUP);
}

void Table::insert(std::uint64_t hash, Position at) {
  const std::uint64_t mixed = mix(hash);
  Part& part = parts_[mixed % PARTS];
  if (part.used >= part.groups * (GROUP * 7 / 8)) make_room(part);
  place(part, mixed, at);
  ++count_;
}

// Takes the first vacant slot; keeps at least one slot of the part empty.
void Table::place(Part& part, std::uint64_t mixed, Position at) {
  for (std::uint32_t group = group_of(mixed, part.groups);;) {
    std::uint8_t* const tags = part.record + std::size_t{group} * GROUP;
    const std::uint32_t vacant = vacancies(tags);
    if (vacant != 0) {
      const auto slot = static_cast<std::uint32_t>(std::countr_zero(vacant));
      if (tags[slot] == EMPTY) ++part.used;
      tags[slot] = tag_of(mixed);
      positions(part)[group * GROUP + slot] = at;
      ++part.full;
      return;
    }
    if (++group == part.groups) group = 0;
  }
}

std::uint32_t Table::locate(const Part& part, std::uint64_t mixed, Position at) const {
  const std::uint8_t tag = tag_of(mixed);
  for (std::uint32_t group = group_of(mixed, part.groups);;) {
    const std::uint8_t* const tags = part.record + std::size_t{group} * GROUP;
    for (std::uint32_t found = matches(tags, tag); found != 0; found &= found - 1) {
      const std::uint32_t slot = group * GROUP + static_cast<std::uint32_t>(std::countr_zero(found));
      if (positions(part)[slot] == at) return slot;
    }
    assert(matches(tags, EMPTY) == 0);
    if (++group == part.groups) group = 0;
  }
}

void Table::erase(std::uint64_t hash, Position at) {
  const std::uint64_t mixed = mix(hash);
  Part& part = parts_[mixed % PARTS];
  const std::uint32_t slot = locate(part, mixed, at);
  std::uint8_t* const tags = part.record + slot / GROUP * GROUP;
  // A search that came by here stopped if the group had an empty slot, so one more does not cut any search short.
  const bool stops_here = matches(tags, EMPTY) != 0;
  tags[slot % GROUP] = stops_here ? EMPTY : GONE;
  if (stops_here) --part.used;
  --part.full;
  --count_;
  ++part.erased;
  const std::uint64_t slots = std::uint64_t{part.groups} * GROUP;
  const bool sparse = part.full * std::uint64_t{10} < slots * 7 && std::uint64_t{part.erased} * 4 >= part.full;
  if (!sparse && part.full * std::uint64_t{2} >= slots) return;
  const std::uint32_t fitting = class_for(part.full);
  if (fitting < part.size_class) resize(part, fitting);
}

void Table::repoint(std::uint64_t hash, Position from, Position to) {
  const std::uint64_t mixed = mix(hash);
  const Part& part = parts_[mixed % PARTS];
  positions(part)[locate(part, mixed, from)] = to;
}

// Smallest class of which `full` slots are at most 13/16.
std::uint32_t Table::class_for(std::uint32_t full) const {
  std::uint32_t found = 0;
  while (std::uint64_t{class_groups_[found]} * GROUP * 13 < std::uint64_t{full} * 16) ++found;
  return found;
}

void Table::make_room(Part& part) {
  if (part.record == nullptr) {
    resize(part, 0);
  } else if (std::uint64_t{part.full} * 4 >= std::uint64_t{part.groups} * GROUP * 3) {
    resize(part, part.size_class + CLASSES_A_STEP);
  } else {
    resize(part, part.size_class);  // full of gone slots: clean up in place of growing
  }
}

void Table::resize(Part& part, std::uint32_t size_class) {
  if (size_class >= pools_.size()) throw std::bad_alloc();
  Pool& pool = pools_[size_class];
  const Part old = part;
  Part grown;
  grown.index = pool.allocate();
  grown.record = pool.at(grown.index);
  grown.groups = class_groups_[size_class];
  grown.size_class = size_class;
  *owner(size_class, grown.index) = static_cast<std::uint32_t>(&part - parts_.data());
  std::memset(grown.record, EMPTY, std::size_t{grown.groups} * GROUP);
  for (std::uint32_t slot = 0; slot < old.groups * GROUP; slot += BATCH) move_batch(old, slot, grown);
  part = grown;
  if (old.record == nullptr) return;
  Pool& old_pool = pools_[old.size_class];
  if (old_pool.release(old.index)) {
    Part& moved = parts_[*owner(old.size_class, old.index)];
    moved.index = old.index;
    moved.record = old_pool.at(old.index);
  }
}

// Moves the full slots of a few groups. In steps, so that the cache misses of one step overlap.
void Table::move_batch(const Part& from, std::uint32_t first, Part& to) const {
  Position moving[BATCH];
  std::uint64_t mixed[BATCH];
  std::uint32_t count = 0;
  const std::uint32_t end = std::min(first + BATCH, from.groups * GROUP);
  for (std::uint32_t slot = first; slot < end; ++slot)
    if (from.record[slot] < EMPTY) moving[count++] = positions(from)[slot];
  for (std::uint32_t i = 0; i < count; ++i) __builtin_prefetch(&pages_[page_of(moving[i])]);
  for (std::uint32_t i = 0; i < count; ++i) __builtin_prefetch(pages_.address(moving[i]));
  for (std::uint32_t i = 0; i < count; ++i) {
    mixed[i] = mix(*pages_.address(moving[i]));
    const std::size_t group = group_of(mixed[i], to.groups);
    __builtin_prefetch(to.record + group * GROUP);
    __builtin_prefetch(positions(to) + group * GROUP);
  }
  for (std::uint32_t i = 0; i < count; ++i) place(to, mixed[i], moving[i]);
}

void Table::trim() {
  for (Pool& pool : pools_) pool.trim(0);
}

}  // namespace kvtier::index
