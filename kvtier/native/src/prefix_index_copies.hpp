// Counts above one: how many extra copies a lane has of a block. Rare, so a small open-addressed map beside the pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::index {

class Copies {
 public:
  explicit Copies(std::uint64_t seed) : seed_(seed) {}

  std::size_t bytes() const { return entries_.capacity() * sizeof(Entry); }
  std::size_t size() const { return size_; }

  std::uint32_t get(std::uint32_t lane, std::uint64_t hash) const {
    if (size_ == 0) return 0;
    return entries_[probe(lane, hash)].extra;
  }

  // Sets the extra copies; 0 forgets the entry.
  void set(std::uint32_t lane, std::uint64_t hash, std::uint32_t extra) {
    if (extra == 0) {
      if (size_ != 0) erase(probe(lane, hash));
      return;
    }
    if ((size_ + 1) * 4 > entries_.size() * 3) resize(entries_.empty() ? 16 : entries_.size() * 2);
    Entry& entry = entries_[probe(lane, hash)];
    if (entry.extra == 0) ++size_;
    entry = {hash, lane, extra};
  }

  // Forgets all entries of lanes for which `gone(lane)`.
  template <typename Gone>
  void purge(Gone gone) {
    std::vector<Entry> old;
    old.swap(entries_);
    size_ = 0;
    std::size_t kept = 0;
    for (const Entry& entry : old) kept += entry.extra != 0 && !gone(entry.lane);
    std::size_t slots = 16;
    while (kept * 4 > slots * 3) slots *= 2;
    if (kept != 0) resize(slots);
    for (const Entry& entry : old)
      if (entry.extra != 0 && !gone(entry.lane)) set(entry.lane, entry.hash, entry.extra);
  }

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint32_t lane;
    std::uint32_t extra;  // 0: empty
  };

  std::size_t home(std::uint32_t lane, std::uint64_t hash) const {
    std::uint64_t x = (hash ^ seed_) * 0x9E3779B97F4A7C15u + lane;
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
    return (x ^ x >> 32) & (entries_.size() - 1);
  }

  std::size_t probe(std::uint32_t lane, std::uint64_t hash) const {
    std::size_t i = home(lane, hash);
    while (entries_[i].extra != 0 && (entries_[i].hash != hash || entries_[i].lane != lane))
      i = (i + 1) & (entries_.size() - 1);
    return i;
  }

  // Closes the gap, so that no search is cut short.
  void erase(std::size_t gap) {
    if (entries_[gap].extra == 0) return;
    const std::size_t last = entries_.size() - 1;
    for (std::size_t i = (gap + 1) & last; entries_[i].extra != 0; i = (i + 1) & last) {
      const std::size_t wanted = home(entries_[i].lane, entries_[i].hash);
      if (((i - wanted) & last) >= ((i - gap) & last)) {
        entries_[gap] = entries_[i];
        gap = i;
      }
    }
    entries_[gap] = {};
    --size_;
    if (entries_.size() > 16 && size_ * 4 < entries_.size()) resize(size_ == 0 ? 0 : entries_.size() / 2);
  }

  void resize(std::size_t slots) {
    std::vector<Entry> old(slots);
    old.swap(entries_);
    for (const Entry& entry : old)
      if (entry.extra != 0) entries_[probe(entry.lane, entry.hash)] = entry;
  }

  std::uint64_t seed_;
  std::size_t size_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace kvtier::index
