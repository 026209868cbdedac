// Pages: up to 64 blocks of one chain that lie together, and who holds which of them. What must not live here: holders,
// counts above one, matching.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

#include "prefix_index_pool.hpp"

namespace kvtier::index {

constexpr std::uint32_t SLOTS = 64;
constexpr std::uint32_t SLOT_BITS = 6;
constexpr std::uint32_t PAGES_MAX = 1u << (32 - SLOT_BITS);

// Where a block lies: page id and slot. Page ids are stable until Pages::compact_ids moves one.
using Position = std::uint32_t;

inline Position position(std::uint32_t page, std::uint32_t slot) { return page << SLOT_BITS | slot; }
inline std::uint32_t page_of(Position at) { return at >> SLOT_BITS; }
inline std::uint32_t slot_of(Position at) { return at & (SLOTS - 1); }

// `count` low bits, 1 <= count <= 64.
inline std::uint64_t low_bits(std::uint32_t count) { return ~std::uint64_t{0} >> (SLOTS - count); }

struct Page {
  std::uint64_t live;   // slots that some lane holds
  std::uint64_t mask0;  // the only lane's blocks, while there is one
  std::uint32_t lane0;  // the only lane; or the index of the lane record, while there are more
  std::uint32_t lane_count;
  std::uint32_t record;  // index of the hash record in the pool of `hash_class`
  std::uint32_t newer;   // neighbours in order of last touch; in a free page, neighbours in the free list
  std::uint32_t older;
  std::uint8_t hash_class;  // FREE: not in use
  std::uint8_t lane_class;
  std::uint8_t size;  // slots in use, dead ones included; never a dead one at the end
  std::uint8_t used;  // by a match since it was last touched or spared; written under a shared lock, so atomically

  static constexpr std::uint8_t FREE = 0xFF;
};
static_assert(sizeof(Page) == 40);

// The lanes of a page as two parallel arrays. Valid until the page's lanes change or any other page's do.
class LaneList {
 public:
  LaneList(std::uint64_t* mask_array, std::uint32_t* lane_array, std::uint32_t lane_count)
      : masks(mask_array), lanes(lane_array), count(lane_count) {}

  std::uint64_t* masks;
  std::uint32_t* lanes;
  std::uint32_t count;

  std::uint32_t find(std::uint32_t lane) const {
    std::uint32_t i = 0;
    for (; i + STRIDE <= count; i += STRIDE) {  // a page may have thousands of lanes: compare many at once
      const std::uint32_t* const some = lanes + i;
      std::uint32_t found = 0;
      for (int j = 0; j < STRIDE; ++j) found |= some[j] == lane ? ~0u : 0u;
      if (found != 0) break;
    }
    for (; i < count; ++i)
      if (lanes[i] == lane) return i;
    return NONE;
  }

  // Those of `slots` that no lane holds.
  std::uint64_t unheld(std::uint64_t slots) const {
    for (std::uint32_t i = 0; i < count && slots != 0; ++i) slots &= ~masks[i];
    return slots;
  }

 private:
  static constexpr int STRIDE = 64;
};

class Pages {
 public:
  explicit Pages(Memory& memory);

  Page& operator[](std::uint32_t id) const { return *reinterpret_cast<Page*>(pages_.at(id)); }
  std::uint32_t end() const { return pages_.count(); }
  std::uint32_t count() const { return pages_.count() - free_count_; }
  bool is_free(std::uint32_t id) const { return (*this)[id].hash_class == Page::FREE; }
  std::uint32_t least_recent() const { return oldest_; }
  std::uint32_t most_recent() const { return newest_; }

  // Slots of the page, `size` of them valid. Moves when any page grows, shrinks or dies.
  std::uint64_t* hashes(const Page& page) const {
    return reinterpret_cast<std::uint64_t*>(hash_pools_[page.hash_class].at(page.record)) + 1;
  }
  const std::uint64_t* address(Position at) const { return hashes((*this)[page_of(at)]) + slot_of(at); }
  std::uint64_t hash_at(Position at) const { return *address(at); }
  LaneList lanes(std::uint32_t id) const;

  // A page without slots and lanes, with room for `slots`; the most recently touched. NONE when ids are used up.
  std::uint32_t allocate(std::uint32_t slots);
  void release(std::uint32_t id);
  // Room for at least `slots`; or exactly the class that fits, when it is at most half of the present one.
  void reserve(std::uint32_t id, std::uint32_t slots);
  void fit(std::uint32_t id);
  std::uint32_t capacity(const Page& page) const { return SLOT_CLASSES[page.hash_class]; }

  // Index of the lane in lanes(id), which it joins with an empty mask if need be.
  std::uint32_t add_lane(std::uint32_t id, std::uint32_t lane);
  void remove_lane(std::uint32_t id, std::uint32_t index);

  void touch(std::uint32_t id);
  // Spares the page once when it is the least recently touched. The only change that readers make.
  void note_use(std::uint32_t id) const {
    const std::atomic_ref<std::uint8_t> used((*this)[id].used);
    if (used.load(std::memory_order_relaxed) == 0) used.store(1, std::memory_order_relaxed);
  }
  // The page to evict: least recently touched, those passed over that were used since. There must be a page.
  std::uint32_t victim();

  // An id at the end that should move into a free one below, or NONE. See rename.
  std::uint32_t misplaced(std::uint32_t free_slack);
  // Moves a page to a free id and returns that; who knows the old id must be told.
  std::uint32_t rename(std::uint32_t id);
  void trim();

 private:
  static constexpr std::uint32_t SLOT_CLASSES[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  static constexpr std::uint32_t LANE_CLASSES_COUNT = 48;

  static std::uint32_t lane_capacity(std::uint32_t lane_class);
  static std::uint8_t slot_class(std::uint32_t slots);
  LaneList record_lanes(const Page& page) const;
  std::uint32_t* lane_owner(std::uint32_t lane_class, std::uint32_t record) const;
  void move_hashes(std::uint32_t id, std::uint8_t to);
  void free_hashes(std::uint8_t hash_class, std::uint32_t record);
  std::uint32_t allocate_lanes(std::uint32_t lane_class, std::uint32_t owner);
  void move_lanes(std::uint32_t id, std::uint8_t to);
  void free_lanes(std::uint8_t lane_class, std::uint32_t record);
  void own(std::uint32_t id);
  void link_newest(std::uint32_t id);
  void unlink(std::uint32_t id);
  void push_free(std::uint32_t id);
  void pull_free(std::uint32_t id);

  Pool pages_;
  std::vector<Pool> hash_pools_;
  std::vector<Pool> lane_pools_;
  std::uint32_t newest_ = NONE;
  std::uint32_t oldest_ = NONE;
  std::uint32_t free_ = NONE;
  std::uint32_t free_count_ = 0;
};

}  // namespace kvtier::index
