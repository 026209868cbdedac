#include "prefix_index_match.hpp"

#include <algorithm>
#include <bit>

namespace kvtier::index {

namespace {

enum Source : std::uint32_t { GPU, PREDICTED_SOURCE, DRAM, NVME, PEER, REDIS };

std::uint32_t low_ones(std::uint64_t mask) { return static_cast<std::uint32_t>(std::countr_one(mask)); }

}  // namespace

void MatchRows::reset(std::uint32_t rows, std::uint32_t runs) {
  rows_ = rows;
  runs_ = runs;
  const std::size_t bytes = std::size_t{rows} * 8 + std::size_t{rows} * 4 + (rows + std::size_t{1}) * 4 +
                            std::size_t{runs} * 4 + runs;
  memory_.reset(new std::uint64_t[(bytes + 7) / 8]);
}

void Matcher::match(const Holders& holders, const Holdings& holdings, Hashes query, std::int64_t pool,
                    MatchRows& rows) {
  pool_ = pool;
  begin(holders);
  Span span{NONE, 0, 0};
  for (std::size_t from = 0; from < query.count; from += span.count) {
    if (!next_span(holdings, query, from, span)) break;
    next_stamp();
    gather(holders, holdings, span, from == 0);
    if (from == 0 && any_l2_) join_by_l2(holders);
    advance(holders, span.count);
    if (alive_.empty()) break;
  }
  finish(holders, rows);
  rows.blocks_queried = query.count;
}

void Matcher::begin(const Holders& holders) {
  if (workers_.size() < holders.end()) workers_.resize(holders.end());
  if (cells_.size() < holders.cells()) cells_.resize(holders.cells());
  if (spaces_.size() < holders.spaces()) spaces_.resize(holders.spaces());
  if (group_stamps_.size() < holders.groups().size()) {
    group_stamps_.resize(holders.groups().size());
    group_reach_.resize(holders.groups().size());
  }
  next_stamp();
  query_stamp_ = stamp_;
  alive_.clear();
  joined_.clear();
  runs_.clear();
}

void Matcher::next_stamp() {
  if (++stamp_ != 0) return;
  // After 2^32 spans stamps start again: forget the old ones. A query in progress goes on with what joined it.
  stamp_ = 1;
  for (Worker& worker : workers_) worker.gpu_stamp = worker.predicted_stamp = worker.query_stamp = 0;
  for (Cell& cell : cells_) cell.stamp = 0;
  for (Space& space : spaces_) space.stamp = 0;
  std::fill(group_stamps_.begin(), group_stamps_.end(), 0);
  for (const std::uint32_t worker : alive_) workers_[worker].query_stamp = query_stamp_;
}

bool Matcher::next_span(const Holdings& holdings, Hashes query, std::size_t from, Span& span) const {
  const std::uint64_t* const wanted = query.data + from;
  const Pages& pages = holdings.pages();
  Position at = NONE;
  if (span.page != NONE && span.slot + span.count < pages[span.page].size) {
    const Page& page = pages[span.page];
    const std::uint32_t slot = span.slot + span.count;
    if ((page.live >> slot & 1) != 0 && pages.hashes(page)[slot] == *wanted) at = position(span.page, slot);
  }
  if (at == NONE) at = holdings.table().find(*wanted);
  if (at == NONE) return false;
  const Page& page = pages[page_of(at)];
  span = {page_of(at), slot_of(at), 1};
  pages.note_use(span.page);
  const std::uint64_t* const slots = pages.hashes(page) + span.slot;
  const auto most = static_cast<std::uint32_t>(
      std::min<std::size_t>(low_ones(page.live >> span.slot), query.count - from));
  if (query.count - from > most) holdings.table().prefetch(wanted[most]);
  while (span.count < most && slots[span.count] == wanted[span.count]) ++span.count;
  return true;
}

// Collects who holds which blocks of the span; on the first span, workers with blocks of their own join the query.
void Matcher::gather(const Holders& holders, const Holdings& holdings, const Span& span, bool first) {
  any_l2_ = any_predicted_ = false;
  const LaneList list = holdings.pages().lanes(span.page);
  const std::uint64_t bits = low_bits(span.count);
  for (std::uint32_t i = 0; i < list.count; ++i) {
    const std::uint64_t mask = list.masks[i] >> span.slot & bits;
    if (mask == 0) continue;
    const LaneView& view = holders.view(list.lanes[i]);
    switch (view.role) {
      case Role::HIDDEN:
        break;
      case Role::GPU: {
        if (first) join(holders, view.subject);
        Worker& worker = workers_[view.subject];
        if (worker.gpu_stamp == stamp_) {
          worker.gpu &= mask;
          ++worker.shards_seen;
        } else {
          worker.gpu = mask;
          worker.gpu_stamp = stamp_;
          worker.shards_seen = 1;
        }
        break;
      }
      case Role::PREDICTED: {
        if (first) join(holders, view.subject);
        Worker& worker = workers_[view.subject];
        worker.predicted = mask;
        worker.predicted_stamp = stamp_;
        any_predicted_ = true;
        break;
      }
      case Role::DRAM:
      case Role::NVME: {
        Cell& cell = cells_[view.subject];
        if (cell.stamp != stamp_) cell = {0, 0, stamp_};
        (view.role == Role::DRAM ? cell.dram : cell.nvme) |= mask;
        Space& space = spaces_[view.space];
        if (space.stamp != stamp_) space = {0, 0, stamp_};
        space.stores |= mask;
        any_l2_ = true;
        break;
      }
      case Role::REDIS: {
        Space& space = spaces_[view.space];
        if (space.stamp != stamp_) space = {0, 0, stamp_};
        space.redis |= mask;
        any_l2_ = true;
        break;
      }
    }
  }
}

void Matcher::join(const Holders& holders, std::uint32_t number) {
  Worker& worker = workers_[number];
  if (worker.query_stamp == query_stamp_) return;
  if (pool_ != ANY_POOL && holders[number].spec.pool != pool_) return;
  worker.query_stamp = query_stamp_;
  worker.blocks = worker.runs = 0;
  worker.last_run = NONE;
  alive_.push_back(number);
}

// Every worker that reaches block 0 through L2 joins, though it holds nothing itself.
void Matcher::join_by_l2(const Holders& holders) {
  for (const Group& group : holders.groups()) {
    if (group.members.empty()) continue;
    Reach reach{};
    l2_reach(group, reach);
    if ((reach.up_to[REDIS] & 1) == 0) continue;
    for (const std::uint32_t worker : group.members)
      if (!holders[worker].hidden) join(holders, worker);
  }
}

// What all shards of the group's workers find outside their own GPUs, by source.
void Matcher::l2_reach(const Group& group, Reach& reach) const {
  for (std::uint32_t source = DRAM; source < SOURCES; ++source) reach.up_to[source] = ~std::uint64_t{0};
  for (std::size_t shard = 0; shard < group.cells.size(); ++shard) {
    const Cell& cell = cells_[group.cells[shard]];
    const Space& space = spaces_[group.spaces[shard]];
    std::uint64_t found = cell.stamp == stamp_ ? cell.dram : 0;
    reach.up_to[DRAM] &= found;
    found |= cell.stamp == stamp_ ? cell.nvme : 0;
    reach.up_to[NVME] &= found;
    found |= space.stamp == stamp_ ? space.stores : 0;
    reach.up_to[PEER] &= found;
    found |= space.stamp == stamp_ ? space.redis : 0;
    reach.up_to[REDIS] &= found;
  }
}

// Extends every worker that is still unbroken over the span; the others leave.
void Matcher::advance(const Holders& holders, std::uint32_t count) {
  std::size_t kept = 0;
  for (const std::uint32_t number : alive_) {
    Worker& worker = workers_[number];
    const Holder& holder = holders[number];
    const bool on_gpu = worker.gpu_stamp == stamp_ && worker.shards_seen == holder.spec.namespaces.size();
    const std::uint64_t own = on_gpu ? worker.gpu : 0;
    std::uint32_t prefix = 0;
    if (!any_l2_ && !any_predicted_) {
      prefix = low_ones(own);
      if (prefix != 0) add_run(worker, GPU, prefix);
    } else {
      Reach reach{};
      if (any_l2_) {
        if (group_stamps_[holder.group] != stamp_) {
          group_stamps_[holder.group] = stamp_;
          l2_reach(holders.groups()[holder.group], group_reach_[holder.group]);
        }
        reach = group_reach_[holder.group];
      }
      reach.up_to[GPU] = own;
      reach.up_to[PREDICTED_SOURCE] = own | (worker.predicted_stamp == stamp_ ? worker.predicted : 0);
      for (std::uint32_t source = DRAM; source < SOURCES; ++source)
        reach.up_to[source] |= reach.up_to[PREDICTED_SOURCE];
      prefix = take(number, reach, count);
    }
    if (worker.blocks == prefix && prefix != 0) joined_.push_back(number);
    if (prefix == count) alive_[kept++] = number;
  }
  alive_.resize(kept);
}

// Adds the span's unbroken prefix as runs, each block at its cheapest source. Returns its length.
std::uint32_t Matcher::take(std::uint32_t number, const Reach& reach, std::uint32_t count) {
  const std::uint32_t prefix = std::min(count, low_ones(reach.up_to[SOURCES - 1]));
  for (std::uint32_t done = 0; done < prefix;) {
    std::uint32_t source = 0;
    while ((reach.up_to[source] >> done & 1) == 0) ++source;
    std::uint64_t here = reach.up_to[source];
    if (source != 0) here &= ~reach.up_to[source - 1];
    const std::uint32_t run = std::min(prefix - done, low_ones(here >> done));
    add_run(workers_[number], source, run);
    done += run;
  }
  return prefix;
}

void Matcher::add_run(Worker& worker, std::uint32_t source, std::uint32_t blocks) {
  worker.blocks += blocks;
  if (worker.last_run != NONE && runs_[worker.last_run].source == source) {
    runs_[worker.last_run].blocks += blocks;
    return;
  }
  runs_.push_back({blocks, worker.last_run, static_cast<std::uint8_t>(source)});
  worker.last_run = static_cast<std::uint32_t>(runs_.size() - 1);
  ++worker.runs;
}

std::size_t Matcher::bytes() const {
  return sizeof(*this) + workers_.capacity() * sizeof(Worker) + cells_.capacity() * sizeof(Cell) +
         spaces_.capacity() * sizeof(Space) + group_reach_.capacity() * sizeof(Reach) +
         (group_stamps_.capacity() + alive_.capacity() + joined_.capacity()) * sizeof(std::uint32_t) +
         runs_.capacity() * sizeof(Run);
}

void Matcher::finish(const Holders& holders, MatchRows& rows) {
  if (!std::is_sorted(joined_.begin(), joined_.end())) std::sort(joined_.begin(), joined_.end());
  rows.reset(static_cast<std::uint32_t>(joined_.size()), static_cast<std::uint32_t>(runs_.size()));
  std::uint32_t end = 0;
  rows.run_offsets()[0] = 0;
  rows.blocks_found = 0;
  for (std::size_t row = 0; row < joined_.size(); ++row) {
    const Worker& worker = workers_[joined_[row]];
    rows.workers()[row] = joined_[row];
    rows.tokens()[row] = std::uint64_t{worker.blocks} * holders[joined_[row]].spec.block_tokens;
    rows.blocks_found = std::max<std::uint64_t>(rows.blocks_found, worker.blocks);
    end += worker.runs;
    rows.run_offsets()[row + 1] = end;
    std::uint32_t to = end;
    for (std::uint32_t run = worker.last_run; run != NONE; run = runs_[run].before) {
      --to;
      rows.run_blocks()[to] = runs_[run].blocks;
      rows.run_sources()[to] = runs_[run].source;
    }
  }
}

}  // namespace kvtier::index
