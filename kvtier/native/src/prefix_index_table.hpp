// Hash table from a block's hash to its position, 5 bytes a slot: a 7-bit tag and 32 bits of position, in groups of 16.
// The hash itself is read from the page, so a lookup needs the pages. It is cut into many small tables by hash bits, so
// that growing one is short and growing all needs no second copy. Source of tags and groups: Abseil's Swiss tables.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "prefix_index_pages.hpp"

namespace kvtier::index {

class Table {
 public:
  // `seed` shuffles placement so that no publisher can aim at one slot.
  Table(Memory& memory, const Pages& pages, std::uint64_t seed);

  // Position of the live block with this hash, or NONE.
  Position find(std::uint64_t hash) const;
  void prefetch(std::uint64_t hash) const;

  // `hash` must be absent and `at` must hold it already. Throws std::bad_alloc, changing nothing.
  void insert(std::uint64_t hash, Position at);
  // `hash` must be at `at`; both need no page.
  void erase(std::uint64_t hash, Position at);
  void repoint(std::uint64_t hash, Position from, Position to);

  std::uint64_t count() const { return count_; }
  void trim();

 private:
  static constexpr std::uint32_t PARTS_BITS = 8;
  static constexpr std::uint32_t PARTS = 1u << PARTS_BITS;
  static constexpr std::uint32_t GROUP = 16;
  static constexpr std::uint32_t BATCH = 32;
  static constexpr std::uint32_t CLASSES_A_STEP = 4;  // a part grows by half or more, but shrinks to what fits

  struct Part {
    std::uint8_t* record = nullptr;  // tags[groups * 16], positions[groups * 16], owner
    std::uint32_t groups = 0;
    std::uint32_t used = 0;  // slots that are full or were
    std::uint32_t full = 0;
    std::uint32_t index = NONE;  // of the record in the pool of `size_class`
    std::uint32_t size_class = 0;
    std::uint32_t erased = 0;  // since the record was made: pays for making a smaller one
  };

  std::uint64_t mix(std::uint64_t hash) const;
  static std::uint32_t group_of(std::uint64_t mixed, std::uint32_t groups);
  static Position* positions(const Part& part);
  std::uint32_t locate(const Part& part, std::uint64_t mixed, Position at) const;
  static void place(Part& part, std::uint64_t mixed, Position at);
  void resize(Part& part, std::uint32_t size_class);
  void move_batch(const Part& from, std::uint32_t first, Part& to) const;
  void make_room(Part& part);
  std::uint32_t class_for(std::uint32_t full) const;
  std::uint32_t* owner(std::uint32_t size_class, std::uint32_t index);

  const Pages& pages_;
  std::uint64_t seed_;
  std::uint64_t count_ = 0;
  std::vector<std::uint32_t> class_groups_;
  std::vector<Pool> pools_;
  std::array<Part, PARTS> parts_;
};

}  // namespace kvtier::index
