// Who may hold blocks, and for whose match a holding counts. What must not live here: blocks and pages.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::index {

enum class Kind : std::uint8_t { WORKER = 0, STORE = 1, SHARED = 2 };

constexpr std::uint32_t TIERS = 4;       // gpu, dram, nvme, redis
constexpr std::uint32_t PREDICTED = 4;   // a tier of its own inside: never in snapshot, digest or count
constexpr std::int64_t ANY_POOL = -1;

struct Spec {
  Kind kind = Kind::WORKER;
  std::uint32_t node = 0;
  std::vector<std::uint32_t> namespaces;  // one a shard
  std::uint32_t pool = 0;
  std::uint32_t block_tokens = 0;
};

// What one (holder, tier, shard) holds.
struct Lane {
  std::uint32_t holder = 0;
  std::uint32_t shard = 0;
  std::uint64_t copies = 0;
  std::uint64_t distinct = 0;
  std::uint64_t digest = 0;     // xor over distinct hashes
  std::uint64_t truncated = 0;  // copies lost to the byte budget since the lane was last replaced
  std::uint32_t pages = 0;
  std::uint32_t extras = 0;  // blocks with more than one copy
  std::uint8_t tier = 0;
  bool used = false;
  bool doomed = false;  // being cleared
};

// What match needs to know of a lane, apart so that many fit into a cache line.
enum class Role : std::uint8_t { HIDDEN, GPU, PREDICTED, DRAM, NVME, REDIS };
struct LaneView {
  std::uint32_t subject = 0;  // GPU, PREDICTED: the worker; DRAM, NVME: the cell
  std::uint32_t space = 0;    // DRAM, NVME, REDIS: the namespace
  Role role = Role::HIDDEN;
};

struct Holder {
  bool present = false;
  bool hidden = false;
  std::uint32_t group = 0;      // of a worker
  std::uint32_t cell = 0;       // of a store
  std::uint32_t space = 0;      // of a store or shared holder
  std::uint64_t generation = 0;  // of the add that made it
  std::uint32_t tickets = 0;
  Spec spec;
  std::vector<std::uint32_t> lanes;  // [tier * shards + shard], NONE until used; the predicted lane last
};

// Small dense numbers for keys that come and go.
template <typename Key>
class Interner {
 public:
  std::uint32_t acquire(const Key& key) {
    const auto [found, fresh] = entries_.try_emplace(key, Entry{});
    if (fresh) {
      if (free_.empty()) {
        found->second.number = end_++;
      } else {
        found->second.number = free_.back();
        free_.pop_back();
      }
    }
    ++found->second.references;
    return found->second.number;
  }

  // True when that was the last reference.
  bool release(const Key& key) {
    const auto found = entries_.find(key);
    if (--found->second.references != 0) return false;
    free_.push_back(found->second.number);
    entries_.erase(found);
    return true;
  }

  std::uint32_t end() const { return end_; }

 private:
  struct Entry {
    std::uint32_t number = 0;
    std::uint32_t references = 0;
  };
  std::map<Key, Entry> entries_;
  std::vector<std::uint32_t> free_;
  std::uint32_t end_ = 0;
};

// Workers that see the same L2: one node, the same namespaces shard by shard.
struct Group {
  std::vector<std::uint32_t> cells;   // (node, namespace) of each shard
  std::vector<std::uint32_t> spaces;  // namespace of each shard
  std::vector<std::uint32_t> members;
};

class Holders {
 public:
  // All by dense number; a number at or past the end is absent.
  bool present(std::uint32_t holder) const { return holder < holders_.size() && holders_[holder].present; }
  Holder& operator[](std::uint32_t holder) { return holders_[holder]; }
  const Holder& operator[](std::uint32_t holder) const { return holders_[holder]; }
  std::uint32_t end() const { return static_cast<std::uint32_t>(holders_.size()); }
  std::uint32_t count() const { return count_; }

  void add(std::uint32_t holder, Spec spec);
  void remove(std::uint32_t holder);  // its lanes must be clear
  void hide(std::uint32_t holder, bool hidden);

  // Lane of (tier, shard), made if need be; find: NONE where there is none yet.
  std::uint32_t lane(std::uint32_t holder, std::uint32_t tier, std::uint32_t shard);
  std::uint32_t find_lane(std::uint32_t holder, std::uint32_t tier, std::uint32_t shard) const;
  Lane& lane_at(std::uint32_t lane) { return lanes_[lane]; }
  const Lane& lane_at(std::uint32_t lane) const { return lanes_[lane]; }
  const LaneView& view(std::uint32_t lane) const { return views_[lane]; }

  const std::vector<Group>& groups() const { return groups_; }
  std::uint32_t cells() const { return cells_.end(); }
  std::uint32_t spaces() const { return spaces_.end(); }
  std::size_t bytes() const;  // O(1)

 private:
  using GroupKey = std::pair<std::uint32_t, std::vector<std::uint32_t>>;

  void join_group(std::uint32_t holder);
  void leave_group(std::uint32_t holder);
  LaneView view_of(const Lane& lane) const;
  static std::size_t list_bytes(const Holder& holder);

  std::vector<Holder> holders_;
  std::vector<Lane> lanes_;
  std::vector<LaneView> views_;
  std::vector<std::uint32_t> free_lanes_;
  std::vector<Group> groups_;
  Interner<GroupKey> group_numbers_;
  Interner<std::pair<std::uint32_t, std::uint32_t>> cells_;  // (node, namespace)
  Interner<std::uint32_t> spaces_;
  std::uint32_t count_ = 0;
  std::size_t list_bytes_ = 0;
  std::uint64_t generations_ = 0;
};

}  // namespace kvtier::index
