// What all lanes hold: the pages, the table that finds them, the copies. Not thread-safe. What must not live here: checks
// of a caller's input, matching.
#pragma once

#include <cstdint>
#include <vector>

#include "prefix_index_copies.hpp"
#include "prefix_index_holders.hpp"
#include "prefix_index_pages.hpp"
#include "prefix_index_table.hpp"

namespace kvtier::index {

struct Counts {
  std::uint64_t stored = 0;
  std::uint64_t removed = 0;
  std::uint64_t unknown = 0;  // removes of what the lane did not hold
  std::uint64_t refused = 0;  // stores beyond the most copies that are counted
  std::uint64_t evicted = 0;  // copies of any holder, dropped for the byte budget
};

struct Hashes {
  const std::uint64_t* data = nullptr;
  std::size_t count = 0;
};

class Holdings {
 public:
  Holdings(Holders& holders, std::size_t bytes_max, std::uint64_t seed, std::uint32_t copies_max);

  void store(std::uint32_t lane, const std::uint64_t* parent, Hashes hashes, Counts& counts);
  void remove(std::uint32_t lane, Hashes hashes, Counts& counts);
  // Empties lanes in one pass over the pages; returns copies dropped.
  std::uint64_t clear(const std::vector<std::uint32_t>& lanes);
  // Chain order within each run; a hash as often as it is held.
  void snapshot(std::uint32_t lane, std::vector<std::uint64_t>& hashes, std::vector<std::uint32_t>& run_lengths) const;
  // Bounded housekeeping after changes; evicts pages while over budget. `other_bytes` is what the caller keeps beside.
  void settle(std::size_t other_bytes, Counts& counts);

  const Pages& pages() const { return pages_; }
  const Table& table() const { return table_; }
  std::size_t bytes() const { return memory_.bytes + copies_.bytes(); }
  std::uint64_t evicted() const { return evicted_; }

 private:
  struct Cursor {
    std::uint32_t page = NONE;
    std::uint32_t slot = 0;
  };

  bool holds(const Page& page, std::uint32_t slot, std::uint64_t hash) const;
  std::uint32_t run_length(Cursor at, Hashes rest) const;
  std::uint32_t page_for(Cursor cursor, std::uint32_t spill, std::size_t remaining);
  Cursor append(std::uint32_t page, Hashes rest);
  void mark(std::uint32_t lane, Cursor first, std::uint32_t count, Counts& counts);
  Cursor find_near(Cursor cursor, std::uint64_t hash) const;
  void remove_run(std::uint32_t lane, Cursor first, std::uint32_t count, Counts& counts);
  void drop_slots(std::uint32_t page, std::uint64_t slots);
  void drop_lane_of_page(std::uint32_t page, std::uint32_t index);
  void tidy(std::uint32_t page);
  void repack(std::uint32_t page);
  std::uint64_t forget(std::uint32_t lane, std::uint32_t page, std::uint64_t mask);
  std::uint64_t evict(std::uint32_t page);
  void compact_ids(std::uint32_t moves_max);

  Holders& holders_;
  std::size_t bytes_max_;
  std::uint32_t copies_max_;
  Memory memory_;
  Pages pages_;
  Table table_;
  Copies copies_;
  std::uint64_t evicted_ = 0;
};

}  // namespace kvtier::index
