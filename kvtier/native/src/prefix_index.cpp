#include "prefix_index.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace kvtier::index {

namespace {

enum EventKind : std::uint8_t { STORE = 0, REMOVE = 1, CLEAR_TIER = 2, CLEAR_ALL = 3 };

constexpr std::size_t LOAD_PIECE_BLOCKS = 8192;    // stored under one lock
constexpr std::size_t EXPIRE_BLOCKS_MAX = 1 << 16;  // dropped by one call of expire
constexpr std::size_t TICKET_BYTES = 160;           // map node, set node and bucket of one ticket
constexpr std::size_t TICKETS_SHARE = 4;             // all tickets together: at most this part of the budget
constexpr std::size_t IDLE_MATCHERS_MAX = 16;
constexpr std::size_t EVENTS_AHEAD = 6;
constexpr std::size_t BRIEF_BLOCKS_MAX = 512;
constexpr std::size_t BRIEF_VISITS_MAX = 512;  // of a holder on a page

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::uint32_t check_range(const char* name, std::int64_t value, std::int64_t most) {
  if (value < 0 || value > most)
    refuse(std::string(name) + " must be 0 to " + std::to_string(most) + ", got " + std::to_string(value));
  return static_cast<std::uint32_t>(value);
}

constexpr std::int64_t U32_MOST = 0xFFFFFFFE;

}  // namespace

PrefixIndex::PrefixIndex(const Limits& limits, std::uint64_t seed)
    : limits_(limits),
      holdings_(holders_, static_cast<std::size_t>(std::max(limits.bytes_max, BYTES_MIN)), seed,
                static_cast<std::uint32_t>(limits.copies_max)) {
  if (limits.bytes_max < BYTES_MIN)
    refuse("bytes_max must be at least " + std::to_string(BYTES_MIN) + ", got " + std::to_string(limits.bytes_max));
}

std::uint32_t PrefixIndex::check_holder(std::int64_t holder) const {
  const std::uint32_t number = check_range("holder", holder, limits_.holders_max - 1);
  if (!holders_.present(number)) refuse("unknown holder " + std::to_string(holder));
  return number;
}

std::uint32_t PrefixIndex::check_shard(std::uint32_t holder, std::int64_t shard) const {
  return check_range("shard", shard, static_cast<std::int64_t>(holders_[holder].spec.namespaces.size()) - 1);
}

std::uint32_t PrefixIndex::check_tier(std::uint32_t holder, std::int64_t tier) const {
  const std::uint32_t number = check_range("tier", tier, TIERS - 1);
  const Kind kind = holders_[holder].spec.kind;
  const bool fits = kind == Kind::WORKER ? number == 0 : kind == Kind::STORE ? number == 1 || number == 2 : number == 3;
  if (!fits) {
    static const char* const kinds[] = {"worker", "store", "shared holder"};
    refuse(std::string("a ") + kinds[static_cast<int>(kind)] + " has no tier " + std::to_string(tier));
  }
  return number;
}

void PrefixIndex::check_blocks(std::size_t count, std::int64_t most) const {
  if (count > static_cast<std::size_t>(most))
    refuse("at most " + std::to_string(most) + " blocks in one call, got " + std::to_string(count));
}

void PrefixIndex::add_holder(std::int64_t holder, std::int64_t kind, std::int64_t node,
                             const std::vector<std::int64_t>& namespaces, std::int64_t pool,
                             std::int64_t block_tokens) {
  Spec spec;
  const std::uint32_t number = check_range("holder", holder, limits_.holders_max - 1);
  spec.kind = static_cast<Kind>(check_range("kind", kind, 2));
  spec.node = check_range("node", node, U32_MOST);
  spec.pool = check_range("pool", pool, U32_MOST);
  spec.block_tokens = check_range("block_tokens", block_tokens, limits_.block_tokens_max);
  if (spec.block_tokens == 0) refuse("block_tokens must be at least 1, got 0");
  const std::int64_t most = spec.kind == Kind::WORKER ? limits_.shards_max : 1;
  if (namespaces.empty() || namespaces.size() > static_cast<std::size_t>(most))
    refuse("namespaces must have 1 to " + std::to_string(most) + " entries, got " + std::to_string(namespaces.size()));
  for (const std::int64_t space : namespaces) spec.namespaces.push_back(check_range("namespace", space, U32_MOST));
  const std::lock_guard lock(gate_);
  if (holders_.present(number)) refuse("holder " + std::to_string(holder) + " is there already");
  holders_.add(number, std::move(spec));
  holders_count_.store(holders_.count(), std::memory_order_relaxed);
}

void PrefixIndex::remove_holder(std::int64_t holder) {
  const std::lock_guard lock(gate_);
  const std::uint32_t number = check_holder(holder);
  for (auto ticket = tickets_.begin(); holders_[number].tickets != 0 && ticket != tickets_.end();) {
    const auto current = ticket++;
    if (current->second.worker == number) drop(current);
  }
  std::vector<std::uint32_t> lanes;
  for (const std::uint32_t lane : holders_[number].lanes)
    if (lane != NONE) lanes.push_back(lane);
  holdings_.clear(lanes);
  holders_.remove(number);
  holders_count_.store(holders_.count(), std::memory_order_relaxed);
}

void PrefixIndex::hide(std::int64_t holder, bool hidden) {
  const std::lock_guard lock(gate_);
  holders_.hide(check_holder(holder), hidden);
}

std::vector<std::uint32_t> PrefixIndex::holders() const {
  const std::shared_lock lock(gate_);
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t number = 0; number < holders_.end(); ++number)
    if (holders_.present(number)) numbers.push_back(number);
  return numbers;
}

void PrefixIndex::settle(Counts& counts) { holdings_.settle(bytes_beside(), counts); }

// Memory that is neither pages nor table nor copies.
std::size_t PrefixIndex::bytes_beside() const {
  std::size_t bytes = sizeof(*this) + holders_.bytes() + ticket_bytes_;
  const std::lock_guard idle(matchers_lock_);
  for (const std::unique_ptr<Matcher>& matcher : matchers_) bytes += matcher->bytes();
  return bytes;
}

bool PrefixIndex::apply(std::int64_t holder, std::int64_t shard, const Batch& batch, Counts& counts, bool wait) {
  std::unique_lock lock(gate_, std::defer_lock);
  if (wait) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;
  }
  const std::uint32_t number = check_holder(holder);
  const std::uint32_t part = check_shard(number, shard);
  const std::vector<Event> events = check_batch(number, batch);
  apply_events(number, part, batch, events, counts);
  settle(counts);
  return true;
}

// Checks all of the batch and copies what steers it, so that a caller's later write to its buffers can do no harm.
std::vector<PrefixIndex::Event> PrefixIndex::check_batch(std::uint32_t holder, const Batch& batch) const {
  const std::size_t count = batch.kinds_count;
  if (batch.tiers_count != count || batch.lengths_count != count || batch.parents_count != count)
    refuse("kinds, tiers, lengths and parents must be equally long, got " + std::to_string(count) + ", " +
           std::to_string(batch.tiers_count) + ", " + std::to_string(batch.lengths_count) + " and " +
           std::to_string(batch.parents_count));
  if (count > static_cast<std::size_t>(limits_.batch_events_max))
    refuse("at most " + std::to_string(limits_.batch_events_max) + " events in one batch, got " +
           std::to_string(count));
  check_blocks(batch.hashes.count, limits_.batch_blocks_max);
  std::vector<Event> events(count);
  std::uint64_t blocks = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Event event{batch.kinds[i], batch.tiers[i], batch.lengths[i]};
    if (event.kind > CLEAR_ALL) refuse("kinds must be 0 to 3, got " + std::to_string(event.kind));
    if (event.kind != CLEAR_ALL) check_tier(holder, event.tier);
    if (event.kind >= CLEAR_TIER && event.length != 0)
      refuse("a clear has no blocks, got " + std::to_string(event.length));
    blocks += event.length;
    events[i] = event;
  }
  if (blocks != batch.hashes.count)
    refuse("lengths add up to " + std::to_string(blocks) + " blocks, hashes has " + std::to_string(batch.hashes.count));
  return events;
}

void PrefixIndex::apply_events(std::uint32_t holder, std::uint32_t shard, const Batch& batch,
                               const std::vector<Event>& events, Counts& counts) {
  std::size_t offset = 0;
  std::size_t ahead = 0;  // event whose first block was prefetched last
  std::size_t ahead_offset = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    for (; ahead < events.size() && ahead < i + EVENTS_AHEAD; ++ahead) {
      if (events[ahead].length != 0) holdings_.table().prefetch(batch.hashes.data[ahead_offset]);
      if (batch.parents[ahead] != 0) holdings_.table().prefetch(batch.parents[ahead]);
      ahead_offset += events[ahead].length;
    }
    const Event& event = events[i];
    const Hashes hashes{batch.hashes.data + offset, event.length};
    offset += event.length;
    switch (event.kind) {
      case STORE: {
        const std::uint64_t parent = batch.parents[i];
        holdings_.store(holders_.lane(holder, event.tier, shard), parent == 0 ? nullptr : &parent, hashes, counts);
        break;
      }
      case REMOVE: {
        holdings_.remove(holders_.lane(holder, event.tier, shard), hashes, counts);
        break;
      }
      case CLEAR_TIER:
        counts.removed += holdings_.clear(lanes_of(holder, event.tier, shard));
        break;
      default:
        counts.removed += holdings_.clear(lanes_of(holder, std::nullopt, shard));
    }
  }
}

std::vector<std::uint32_t> PrefixIndex::lanes_of(std::uint32_t holder, std::optional<std::uint32_t> tier,
                                                 std::optional<std::uint32_t> shard) const {
  std::vector<std::uint32_t> lanes;
  const auto shards = static_cast<std::uint32_t>(holders_[holder].spec.namespaces.size());
  for (std::uint32_t t = tier.value_or(0); t <= tier.value_or(TIERS - 1); ++t)
    for (std::uint32_t s = shard.value_or(0); s <= shard.value_or(shards - 1); ++s) {
      const std::uint32_t lane = holders_.find_lane(holder, t, s);
      if (lane != NONE) lanes.push_back(lane);
    }
  return lanes;
}

Counts PrefixIndex::store(std::int64_t holder, std::int64_t tier, std::int64_t shard, Hashes hashes,
                          std::uint64_t parent) {
  const std::lock_guard lock(gate_);
  const std::uint32_t number = check_holder(holder);
  const std::uint32_t part = check_shard(number, shard);
  const std::uint32_t level = check_tier(number, tier);
  check_blocks(hashes.count, limits_.batch_blocks_max);
  Counts counts;
  holdings_.store(holders_.lane(number, level, part), parent == 0 ? nullptr : &parent, hashes, counts);
  settle(counts);
  return counts;
}

Counts PrefixIndex::remove(std::int64_t holder, std::int64_t tier, std::int64_t shard, Hashes hashes) {
  const std::lock_guard lock(gate_);
  const std::uint32_t number = check_holder(holder);
  const std::uint32_t part = check_shard(number, shard);
  const std::uint32_t level = check_tier(number, tier);
  check_blocks(hashes.count, limits_.batch_blocks_max);
  Counts counts;
  holdings_.remove(holders_.lane(number, level, part), hashes, counts);
  settle(counts);
  return counts;
}

std::uint64_t PrefixIndex::clear(std::int64_t holder, std::optional<std::int64_t> tier,
                                 std::optional<std::int64_t> shard) {
  const std::lock_guard lock(gate_);
  const std::uint32_t number = check_holder(holder);
  std::optional<std::uint32_t> level;
  std::optional<std::uint32_t> part;
  if (tier) level = check_tier(number, *tier);
  if (shard) part = check_shard(number, *shard);
  return holdings_.clear(lanes_of(number, level, part));
}

bool PrefixIndex::is_brief(std::size_t blocks) const {
  const std::size_t holders = holders_count_.load(std::memory_order_relaxed);
  return blocks <= BRIEF_BLOCKS_MAX && (blocks / SLOTS + 1) * holders <= BRIEF_VISITS_MAX;
}

bool PrefixIndex::match(Hashes query, std::int64_t pool, MatchRows& rows, bool wait) const {
  check_blocks(query.count, limits_.match_blocks_max);
  if (pool < ANY_POOL || pool > U32_MOST) refuse("unknown pool " + std::to_string(pool));
  std::unique_ptr<Matcher> matcher = borrow_matcher();
  bool done = false;
  {
    std::shared_lock lock(gate_, std::defer_lock);
    if (wait) {
      lock.lock();
      done = true;
    } else {
      done = lock.try_lock();
    }
    if (done) matcher->match(holders_, holdings_, query, pool, rows);
  }
  give_back(std::move(matcher));
  if (!done) return false;
  matches_.fetch_add(1, std::memory_order_relaxed);
  blocks_queried_.fetch_add(rows.blocks_queried, std::memory_order_relaxed);
  blocks_found_.fetch_add(rows.blocks_found, std::memory_order_relaxed);
  return true;
}

void PrefixIndex::locate(Hashes query, std::int64_t name_space, std::int64_t most, std::uint64_t turn,
                         std::vector<std::uint32_t>& counts, std::vector<std::uint32_t>& holders) const {
  check_blocks(query.count, limits_.match_blocks_max);
  const std::uint32_t space = check_range("namespace", name_space, U32_MOST);
  const std::uint32_t ceiling = check_range("most", most, U32_MOST);
  const std::shared_lock lock(gate_);
  const Pages& pages = holdings_.pages();
  counts.reserve(query.count);
  for (std::size_t i = 0; i < query.count; ++i) {
    const std::size_t first = holders.size();
    const Position at = holdings_.table().find(query.data[i]);
    if (at != NONE) {
      const LaneList list = pages.lanes(page_of(at));
      for (std::uint32_t step = 0; step < list.count && holders.size() - first < ceiling; ++step) {
        const std::uint32_t here = static_cast<std::uint32_t>((turn + step) % list.count);
        if ((list.masks[here] >> slot_of(at) & 1) == 0) continue;
        const Role role = holders_.view(list.lanes[here]).role;
        if (role != Role::DRAM && role != Role::NVME) continue;
        const std::uint32_t holder = holders_.lane_at(list.lanes[here]).holder;
        if (holders_[holder].spec.namespaces[0] != space) continue;
        if (std::find(holders.begin() + static_cast<std::ptrdiff_t>(first), holders.end(), holder) == holders.end())
          holders.push_back(holder);
      }
    }
    counts.push_back(static_cast<std::uint32_t>(holders.size() - first));
  }
}

std::unique_ptr<Matcher> PrefixIndex::borrow_matcher() const {
  {
    const std::lock_guard lock(matchers_lock_);
    if (!matchers_.empty()) {
      std::unique_ptr<Matcher> matcher = std::move(matchers_.back());
      matchers_.pop_back();
      return matcher;
    }
  }
  return std::make_unique<Matcher>();
}

void PrefixIndex::give_back(std::unique_ptr<Matcher> matcher) const {
  const std::lock_guard lock(matchers_lock_);
  if (matchers_.size() < IDLE_MATCHERS_MAX) matchers_.push_back(std::move(matcher));
}

void PrefixIndex::snapshot(std::int64_t holder, std::int64_t tier, std::int64_t shard,
                           std::vector<std::uint64_t>& hashes, std::vector<std::uint32_t>& run_lengths) const {
  const std::shared_lock lock(gate_);
  const std::uint32_t number = check_holder(holder);
  const std::uint32_t part = check_shard(number, shard);
  const std::uint32_t lane = holders_.find_lane(number, check_tier(number, tier), part);
  if (lane != NONE) holdings_.snapshot(lane, hashes, run_lengths);
}

Counts PrefixIndex::load(std::int64_t holder, std::int64_t tier, std::int64_t shard, Hashes hashes,
                         const std::vector<std::uint32_t>& run_lengths) {
  std::uint64_t blocks = 0;
  for (const std::uint32_t length : run_lengths) blocks += length;
  if (blocks != hashes.count)
    refuse("run_lengths add up to " + std::to_string(blocks) + " blocks, hashes has " + std::to_string(hashes.count));
  Counts counts;
  std::uint32_t number = 0;
  std::uint64_t generation = 0;
  std::size_t done = 0;
  std::size_t run = 0;
  std::size_t run_end = 0;
  for (bool first = true; first || done < hashes.count; first = false) {
    const std::lock_guard lock(gate_);
    if (first) {
      number = check_holder(holder);
      generation = holders_[number].generation;
      check_shard(number, shard);
      check_tier(number, tier);
    } else if (!holders_.present(number) || holders_[number].generation != generation) {
      refuse("holder " + std::to_string(holder) + " was removed during the load");
    }
    const auto level = static_cast<std::uint32_t>(tier);
    const auto part = static_cast<std::uint32_t>(shard);
    const std::uint32_t lane = holders_.lane(number, level, part);
    if (first) holdings_.clear({lane});
    for (const std::size_t piece_end = done + LOAD_PIECE_BLOCKS; done < hashes.count && done < piece_end;) {
      if (done == run_end) {
        run_end += run_lengths[run++];
        continue;
      }
      done = load_piece(lane, hashes, done, run_end, counts);
    }
    settle(counts);
  }
  return counts;
}

// Stores what is left of a run, at most one piece of it.
std::size_t PrefixIndex::load_piece(std::uint32_t lane, Hashes hashes, std::size_t done, std::size_t run_end,
                                    Counts& counts) {
  const std::size_t end = std::min(run_end, done + LOAD_PIECE_BLOCKS);
  const std::uint64_t* const parent = done == 0 ? nullptr : hashes.data + done - 1;
  holdings_.store(lane, parent, {hashes.data + done, end - done}, counts);
  return end;
}

Digest PrefixIndex::digest(std::int64_t holder, std::int64_t tier, std::int64_t shard) const {
  const std::shared_lock lock(gate_);
  const std::uint32_t number = check_holder(holder);
  const std::uint32_t part = check_shard(number, shard);
  const std::uint32_t lane = holders_.find_lane(number, check_tier(number, tier), part);
  if (lane == NONE) return {};
  return {holders_.lane_at(lane).copies, holders_.lane_at(lane).digest};
}

std::optional<bool> PrefixIndex::predict(std::int64_t worker, Hashes hashes, std::uint64_t ticket, double expires_at,
                                         bool wait) {
  if (!std::isfinite(expires_at)) refuse("expires_at must be finite");
  check_blocks(hashes.count, limits_.match_blocks_max);
  std::unique_lock lock(gate_, std::defer_lock);
  if (wait) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return std::nullopt;
  }
  const std::uint32_t number = check_holder(worker);
  if (holders_[number].spec.kind != Kind::WORKER) refuse("holder " + std::to_string(worker) + " is no worker");
  const auto known = tickets_.find(ticket);
  const bool replaces = known != tickets_.end() && known->second.worker == number;
  if (!replaces && holders_[number].tickets >= limits_.tickets_per_worker_max)
    refuse("worker " + std::to_string(worker) + " has " + std::to_string(holders_[number].tickets) +
           " tickets already");
  if (known != tickets_.end()) drop(known);
  // Tickets cannot be evicted: without a ceiling of their own they would drive out everything that is really held.
  const std::size_t ticket_bytes = TICKET_BYTES + hashes.count * sizeof(std::uint64_t);
  if (ticket_bytes_ + ticket_bytes > static_cast<std::size_t>(limits_.bytes_max) / TICKETS_SHARE) return false;
  Ticket made{number, expires_at, {hashes.data, hashes.data + hashes.count}};
  ticket_bytes_ += ticket_bytes;
  Counts counts;
  holdings_.store(holders_.lane(number, PREDICTED, 0), nullptr, {made.hashes.data(), made.hashes.size()}, counts);
  tickets_.emplace(ticket, std::move(made));
  by_expiry_.emplace(expires_at, ticket);
  ++holders_[number].tickets;
  settle(counts);
  return true;
}

// Forgets a ticket and its blocks; returns how many blocks it named.
std::uint64_t PrefixIndex::drop(Tickets::iterator ticket) {
  const Ticket& gone = ticket->second;
  const std::size_t blocks = gone.hashes.size();
  Counts counts;
  holdings_.remove(holders_.lane(gone.worker, PREDICTED, 0), {gone.hashes.data(), blocks}, counts);
  --holders_[gone.worker].tickets;
  ticket_bytes_ -= TICKET_BYTES + blocks * sizeof(std::uint64_t);
  by_expiry_.erase({gone.expires_at, ticket->first});
  tickets_.erase(ticket);
  return blocks;
}

std::optional<bool> PrefixIndex::release(std::uint64_t ticket, bool wait) {
  std::unique_lock lock(gate_, std::defer_lock);
  if (wait) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return std::nullopt;
  }
  const auto known = tickets_.find(ticket);
  if (known == tickets_.end()) return false;
  drop(known);
  Counts counts;
  settle(counts);
  return true;
}

std::uint64_t PrefixIndex::expire(double now) {
  if (std::isnan(now)) refuse("now must be a number");
  const std::lock_guard lock(gate_);
  std::uint64_t expired = 0;
  for (std::size_t blocks = 0; blocks < EXPIRE_BLOCKS_MAX && !by_expiry_.empty(); ++expired) {
    const auto [expires_at, ticket] = *by_expiry_.begin();
    if (expires_at > now) break;
    blocks += drop(tickets_.find(ticket)) + 1;
  }
  Counts counts;
  if (expired != 0) settle(counts);
  return expired;
}

Stats PrefixIndex::stats() const {
  const std::shared_lock lock(gate_);
  Stats stats;
  stats.blocks = holdings_.table().count();
  stats.pages = holdings_.pages().count();
  stats.tickets = tickets_.size();
  stats.bytes = holdings_.bytes() + bytes_beside();
  stats.evicted = holdings_.evicted();
  stats.matches = matches_.load(std::memory_order_relaxed);
  stats.blocks_queried = blocks_queried_.load(std::memory_order_relaxed);
  stats.blocks_found = blocks_found_.load(std::memory_order_relaxed);
  for (std::uint32_t number = 0; number < holders_.end(); ++number) {
    if (!holders_.present(number)) continue;
    HolderStats holder;
    holder.holder = number;
    holder.hidden = holders_[number].hidden;
    for (const std::uint32_t lane_number : holders_[number].lanes) {
      if (lane_number == NONE) continue;
      const Lane& lane = holders_.lane_at(lane_number);
      if (lane.tier == PREDICTED) {
        stats.predicted += lane.copies;
        continue;
      }
      holder.copies[lane.tier] += lane.copies;
      holder.truncated += lane.truncated;
      stats.holdings += lane.copies;
    }
    stats.holders.push_back(holder);
  }
  return stats;
}

}  // namespace kvtier::index
