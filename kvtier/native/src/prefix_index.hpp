// The prefix index as its callers see it: checks every argument, then locks, then acts. Many matches run beside each
// other, one change at a time. Errors are std::invalid_argument. What must not live here: Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "batch_message.hpp"
#include "prefix_index_holders.hpp"
#include "prefix_index_holdings.hpp"
#include "prefix_index_match.hpp"

namespace kvtier::index {

struct Limits {
  std::int64_t bytes_max = 0;
  std::int64_t holders_max = 0;
  std::int64_t shards_max = 0;
  std::int64_t block_tokens_max = 0;
  std::int64_t batch_events_max = 0;
  std::int64_t batch_blocks_max = 0;
  std::int64_t match_blocks_max = 0;
  std::int64_t copies_max = 0;
  std::int64_t tickets_per_worker_max = 0;
};

constexpr std::int64_t BYTES_MIN = std::int64_t{4} << 20;

// An event batch as parallel arrays; `parents` and `hashes` are read while it is applied, the others before.
struct Batch {
  const std::uint8_t* kinds = nullptr;
  const std::uint8_t* tiers = nullptr;
  const std::uint32_t* lengths = nullptr;
  const std::uint64_t* parents = nullptr;
  std::size_t kinds_count = 0;
  std::size_t tiers_count = 0;
  std::size_t lengths_count = 0;
  std::size_t parents_count = 0;
  Hashes hashes;
};

// What came of a run of messages.
struct Run {
  std::uint64_t messages = 0;
  std::uint64_t events = 0;
  Counts counts;
};

struct Digest {
  std::uint64_t count = 0;
  std::uint64_t xored = 0;
};

struct HolderStats {
  std::uint32_t holder = 0;
  bool hidden = false;
  std::uint64_t copies[TIERS] = {};
  std::uint64_t truncated = 0;
};

struct Stats {
  std::uint64_t blocks = 0;
  std::uint64_t holdings = 0;
  std::uint64_t predicted = 0;
  std::uint64_t pages = 0;
  std::uint64_t tickets = 0;
  std::uint64_t bytes = 0;
  std::uint64_t evicted = 0;
  std::uint64_t matches = 0;
  std::uint64_t blocks_queried = 0;
  std::uint64_t blocks_found = 0;
  std::vector<HolderStats> holders;
};

// Readers share, writers do not wait for readers that come later.
class Gate {
 public:
  void lock() {
    const std::lock_guard turn(turn_);
    lock_.lock();
  }
  bool try_lock() {
    if (!turn_.try_lock()) return false;
    const bool locked = lock_.try_lock();
    turn_.unlock();
    return locked;
  }
  void unlock() { lock_.unlock(); }
  void lock_shared() {
    { const std::lock_guard turn(turn_); }
    lock_.lock_shared();
  }
  bool try_lock_shared() {
    if (!turn_.try_lock()) return false;
    const bool locked = lock_.try_lock_shared();
    turn_.unlock();
    return locked;
  }
  void unlock_shared() { lock_.unlock_shared(); }

 private:
  std::mutex turn_;
  std::shared_mutex lock_;
};

class PrefixIndex {
 public:
  PrefixIndex(const Limits& limits, std::uint64_t seed);

  void add_holder(std::int64_t holder, std::int64_t kind, std::int64_t node, const std::vector<std::int64_t>& namespaces,
                  std::int64_t pool, std::int64_t block_tokens);
  void remove_holder(std::int64_t holder);
  void hide(std::int64_t holder, bool hidden);
  std::vector<std::uint32_t> holders() const;

  // False, without having done anything, where another thread has the index and `wait` is false.
  bool apply(std::int64_t holder, std::int64_t shard, const Batch& batch, Counts& counts, bool wait);
  // Applies messages numbered `seq` and up, in order, and stops before the first that is not plain, not the next one or
  // would be refused, and after what fills `room_blocks` or is enough for one call. Returns as `apply` does.
  bool apply_messages(std::int64_t holder, std::int64_t shard, std::uint64_t seq, const std::vector<Column>& messages,
                      std::int64_t room_blocks, Run& run, bool wait);
  Counts store(std::int64_t holder, std::int64_t tier, std::int64_t shard, Hashes hashes, std::uint64_t parent);
  Counts remove(std::int64_t holder, std::int64_t tier, std::int64_t shard, Hashes hashes);
  // Returns copies dropped; no tier: all, no shard: all.
  std::uint64_t clear(std::int64_t holder, std::optional<std::int64_t> tier, std::optional<std::int64_t> shard);

  // With `wait` false: false when it would have to wait for a change, and `rows` untouched.
  // Whether a match of so many blocks takes no more than a few microseconds.
  bool is_brief(std::size_t blocks) const;
  bool match(Hashes query, std::int64_t pool, MatchRows& rows, bool wait) const;

  // Which visible stores of a namespace hold each block, in whichever of their tiers: per block how many, and those
  // holders one after another. No more than `most` of a block, beginning at another one for another `turn`.
  void locate(Hashes query, std::int64_t name_space, std::int64_t most, std::uint64_t turn,
              std::vector<std::uint32_t>& counts, std::vector<std::uint32_t>& holders) const;

  void snapshot(std::int64_t holder, std::int64_t tier, std::int64_t shard, std::vector<std::uint64_t>& hashes,
                std::vector<std::uint32_t>& run_lengths) const;
  // Replaces what the lane holds, in pieces between which matches run.
  Counts load(std::int64_t holder, std::int64_t tier, std::int64_t shard, Hashes hashes,
              const std::vector<std::uint32_t>& run_lengths);
  Digest digest(std::int64_t holder, std::int64_t tier, std::int64_t shard) const;

  // False, and nothing is predicted, where the tickets have their share of the budget already. Nothing at all, for both,
  // where another thread has the index and `wait` is false.
  std::optional<bool> predict(std::int64_t worker, Hashes hashes, std::uint64_t ticket, double expires_at, bool wait);
  std::optional<bool> release(std::uint64_t ticket, bool wait);
  std::uint64_t expire(double now);

  Stats stats() const;

 private:
  struct Event {
    std::uint8_t kind;
    std::uint8_t tier;
    std::uint32_t length;
  };
  struct Ticket {
    std::uint32_t worker = 0;
    double expires_at = 0;
    std::vector<std::uint64_t> hashes;
  };
  using Tickets = std::unordered_map<std::uint64_t, Ticket>;

  std::uint32_t check_holder(std::int64_t holder) const;
  std::uint32_t check_shard(std::uint32_t holder, std::int64_t shard) const;
  std::uint32_t check_tier(std::uint32_t holder, std::int64_t tier) const;
  void check_blocks(std::size_t count, std::int64_t most) const;
  std::vector<Event> check_batch(std::uint32_t holder, const Batch& batch) const;
  bool apply_message(std::uint32_t holder, std::uint32_t shard, const BatchMessage& message,
                     std::vector<std::uint64_t>& aligned, Run& run);
  std::vector<std::uint32_t> lanes_of(std::uint32_t holder, std::optional<std::uint32_t> tier,
                                      std::optional<std::uint32_t> shard) const;
  void apply_events(std::uint32_t holder, std::uint32_t shard, const Batch& batch, const std::vector<Event>& events,
                    Counts& counts);
  std::size_t load_piece(std::uint32_t lane, Hashes hashes, std::size_t done, std::size_t run_end, Counts& counts);
  void settle(Counts& counts);
  std::size_t bytes_beside() const;
  std::uint64_t drop(Tickets::iterator ticket);
  std::unique_ptr<Matcher> borrow_matcher() const;
  void give_back(std::unique_ptr<Matcher> matcher) const;

  Limits limits_;
  mutable Gate gate_;
  Holders holders_;
  Holdings holdings_;
  Tickets tickets_;
  std::set<std::pair<double, std::uint64_t>> by_expiry_;
  std::size_t ticket_bytes_ = 0;

  mutable std::mutex matchers_lock_;
  mutable std::vector<std::unique_ptr<Matcher>> matchers_;
  std::atomic<std::uint32_t> holders_count_{0};
  mutable std::atomic<std::uint64_t> matches_{0};
  mutable std::atomic<std::uint64_t> blocks_queried_{0};
  mutable std::atomic<std::uint64_t> blocks_found_{0};
};

}  // namespace kvtier::index
