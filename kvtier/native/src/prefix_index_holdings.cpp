#include "prefix_index_holdings.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace kvtier::index {

namespace {

constexpr std::size_t PREFETCH_AHEAD = 12;
constexpr std::uint32_t ID_MOVES_MAX = 64;  // page ids compacted after one batch
constexpr std::uint32_t FREE_IDS_SLACK = 256;

// Bits of `mask` at the set bits of `keep`, packed together at the bottom.
std::uint64_t pack(std::uint64_t mask, std::uint64_t keep) {
  std::uint64_t packed = 0;
  for (std::uint32_t to = 0; keep != 0; keep &= keep - 1, ++to)
    packed |= (mask >> std::countr_zero(keep) & 1) << to;
  return packed;
}

}  // namespace

Holdings::Holdings(Holders& holders, std::size_t bytes_max, std::uint64_t seed, std::uint32_t copies_max)
    : holders_(holders),
      bytes_max_(bytes_max),
      copies_max_(copies_max),
      memory_{bytes_max + (std::size_t{64} << 20), 0},
      pages_(memory_),
      table_(memory_, pages_, seed),
      copies_(seed) {}

bool Holdings::holds(const Page& page, std::uint32_t slot, std::uint64_t hash) const {
  return slot < page.size && (page.live >> slot & 1) != 0 && pages_.hashes(page)[slot] == hash;
}

// How many of `rest` lie in consecutive live slots from `at` on; the first one is known to.
std::uint32_t Holdings::run_length(Cursor at, Hashes rest) const {
  const Page& page = pages_[at.page];
  const std::uint64_t* const slots = pages_.hashes(page) + at.slot;
  const auto live = static_cast<std::uint32_t>(std::countr_one(page.live >> at.slot));
  const std::uint32_t most = static_cast<std::uint32_t>(std::min<std::size_t>(live, rest.count));
  std::uint32_t run = 1;
  while (run < most && slots[run] == rest.data[run]) ++run;
  return run;
}

void Holdings::store(std::uint32_t lane, const std::uint64_t* parent, Hashes hashes, Counts& counts) {
  Cursor cursor;
  bool parent_sought = parent == nullptr;
  std::uint32_t spill = NONE;  // where this call appended last: fragments of one chain gather there
  for (std::size_t i = 0; i < std::min(PREFETCH_AHEAD, hashes.count); ++i) table_.prefetch(hashes.data[i]);
  for (std::size_t i = 0; i < hashes.count;) {
    const Hashes rest{hashes.data + i, hashes.count - i};
    const Cursor found = find_near(cursor, *rest.data);
    if (found.page != NONE) {
      const std::uint32_t run = run_length(found, rest);
      mark(lane, found, run, counts);
      cursor = {found.page, found.slot + run - 1};
      i += run;
      continue;
    }
    if (!parent_sought) {
      parent_sought = true;
      if (i == 0) {
        const Position at = table_.find(*parent);
        if (at != NONE) cursor = {page_of(at), slot_of(at)};
      }
    }
    const std::uint32_t page = page_for(cursor, spill, rest.count);
    const std::uint32_t first = pages_[page].size;
    cursor = append(page, rest);
    const std::uint32_t run = cursor.slot - first + 1;
    mark(lane, {page, first}, run, counts);
    spill = page;
    i += run;
  }
}

// Where to put blocks that nobody holds: behind the cursor if that is the end of a page with room, else behind what this
// call appended last, else on a new page.
std::uint32_t Holdings::page_for(Cursor cursor, std::uint32_t spill, std::size_t remaining) {
  for (const std::uint32_t page : {cursor.page, spill}) {
    if (page == NONE || pages_[page].size == SLOTS) continue;
    if (page == cursor.page && cursor.slot + 1 != pages_[page].size) continue;
    return page;
  }
  const std::uint32_t page = pages_.allocate(static_cast<std::uint32_t>(std::min<std::size_t>(remaining, SLOTS)));
  if (page == NONE) throw std::bad_alloc();
  return page;
}

// Appends the first of `rest`, and those after it that nobody holds, while there is room. Returns the last one's place.
Holdings::Cursor Holdings::append(std::uint32_t id, Hashes rest) {
  Page& page = pages_[id];
  const std::uint32_t room = SLOTS - page.size;
  const auto wanted = static_cast<std::uint32_t>(std::min<std::size_t>(rest.count, room));
  std::uint32_t done = 0;
  pages_.reserve(id, page.size + wanted);
  do {
    if (done + PREFETCH_AHEAD < rest.count) table_.prefetch(rest.data[done + PREFETCH_AHEAD]);
    const std::uint64_t hash = rest.data[done];
    pages_.hashes(page)[page.size] = hash;
    table_.insert(hash, position(id, page.size));
    page.live |= std::uint64_t{1} << page.size;
    ++page.size;
    ++done;
  } while (done < wanted && table_.find(rest.data[done]) == NONE);
  pages_.fit(id);
  return {id, page.size - 1u};
}

// Adds `count` slots from `first` on to the lane's blocks.
void Holdings::mark(std::uint32_t number, Cursor first, std::uint32_t count, Counts& counts) {
  const std::uint64_t bits = low_bits(count) << first.slot;
  const std::uint32_t before = pages_[first.page].lane_count;
  const std::uint32_t index = pages_.add_lane(first.page, number);
  Lane& lane = holders_.lane_at(number);
  lane.pages += pages_[first.page].lane_count - before;
  std::uint64_t& mask = pages_.lanes(first.page).masks[index];
  const std::uint64_t fresh = bits & ~mask;
  const std::uint64_t* const hashes = pages_.hashes(pages_[first.page]);
  for (std::uint64_t held = bits & mask; held != 0; held &= held - 1) {
    const std::uint64_t hash = hashes[std::countr_zero(held)];
    const std::uint32_t extra = copies_.get(number, hash);
    if (extra + 1 >= copies_max_) {
      ++counts.refused;
      continue;
    }
    copies_.set(number, hash, extra + 1);
    lane.extras += extra == 0;
    ++lane.copies;
    ++counts.stored;
  }
  mask |= bits;
  std::uint64_t digest = 0;
  for (std::uint64_t left = fresh; left != 0; left &= left - 1) digest ^= hashes[std::countr_zero(left)];
  const auto added = static_cast<std::uint32_t>(std::popcount(fresh));
  lane.digest ^= digest;
  lane.distinct += added;
  lane.copies += added;
  counts.stored += added;
  pages_.touch(first.page);
}

// Place of the block: the slot behind the cursor, at it, before it, or wherever the table says.
Holdings::Cursor Holdings::find_near(Cursor cursor, std::uint64_t hash) const {
  if (cursor.page != NONE) {
    const Page& page = pages_[cursor.page];
    if (holds(page, cursor.slot + 1, hash)) return {cursor.page, cursor.slot + 1};
    if (cursor.slot != 0 && holds(page, cursor.slot - 1, hash)) return {cursor.page, cursor.slot - 1};
  }
  const Position at = table_.find(hash);
  return at == NONE ? Cursor{} : Cursor{page_of(at), slot_of(at)};
}

void Holdings::remove(std::uint32_t lane, Hashes hashes, Counts& counts) {
  Cursor cursor;
  for (std::size_t i = 0; i < hashes.count;) {
    if (i + PREFETCH_AHEAD < hashes.count) table_.prefetch(hashes.data[i + PREFETCH_AHEAD]);
    const Cursor found = find_near(cursor, hashes.data[i]);
    if (found.page == NONE) {
      ++counts.unknown;
      ++i;
      continue;
    }
    const std::uint32_t run = run_length(found, {hashes.data + i, hashes.count - i});
    remove_run(lane, found, run, counts);
    cursor = pages_.is_free(found.page) ? Cursor{} : found;
    i += run;
  }
}

// Takes a copy of each of `count` live slots away from the lane; what it does not hold is unknown. A run at once: slot by
// slot a chain removed from its front would be packed together again and again.
void Holdings::remove_run(std::uint32_t number, Cursor first, std::uint32_t count, Counts& counts) {
  const LaneList list = pages_.lanes(first.page);
  const std::uint32_t index = list.find(number);
  std::uint64_t mine = index == NONE ? 0 : list.masks[index] & low_bits(count) << first.slot;
  const auto removed = static_cast<std::uint32_t>(std::popcount(mine));
  counts.removed += removed;
  counts.unknown += count - removed;
  if (mine == 0) return;
  Lane& lane = holders_.lane_at(number);
  lane.copies -= removed;
  const std::uint64_t* const hashes = pages_.hashes(pages_[first.page]);
  for (std::uint64_t left = lane.extras != 0 ? mine : 0; left != 0; left &= left - 1) {
    const std::uint64_t hash = hashes[std::countr_zero(left)];
    const std::uint32_t extra = copies_.get(number, hash);
    if (extra == 0) continue;
    copies_.set(number, hash, extra - 1);
    lane.extras -= extra == 1;
    mine &= ~(left & -left);
  }
  for (std::uint64_t left = mine; left != 0; left &= left - 1) lane.digest ^= hashes[std::countr_zero(left)];
  lane.distinct -= static_cast<std::uint64_t>(std::popcount(mine));
  list.masks[index] &= ~mine;
  const std::uint64_t dead = list.unheld(mine);
  if (list.masks[index] == 0) drop_lane_of_page(first.page, index);
  if (dead == 0) return;
  drop_slots(first.page, dead);
  tidy(first.page);
}

void Holdings::drop_lane_of_page(std::uint32_t page, std::uint32_t index) {
  --holders_.lane_at(pages_.lanes(page).lanes[index]).pages;
  pages_.remove_lane(page, index);
}

// The slots are live no more; the page may be left empty or sparse, see tidy.
void Holdings::drop_slots(std::uint32_t id, std::uint64_t slots) {
  Page& page = pages_[id];
  const std::uint64_t* const hashes = pages_.hashes(page);
  std::uint64_t ahead = slots;
  for (std::size_t i = 0; i < PREFETCH_AHEAD && ahead != 0; ++i, ahead &= ahead - 1)
    table_.prefetch(hashes[std::countr_zero(ahead)]);
  for (std::uint64_t left = slots; left != 0; left &= left - 1) {
    if (ahead != 0) table_.prefetch(hashes[std::countr_zero(ahead)]);
    ahead &= ahead - 1;
    const auto slot = static_cast<std::uint32_t>(std::countr_zero(left));
    table_.erase(hashes[slot], position(id, slot));
  }
  page.live &= ~slots;
}

// Frees an empty page, cuts dead slots off the end, repacks one that is half empty.
void Holdings::tidy(std::uint32_t id) {
  Page& page = pages_[id];
  if (page.live == 0) {
    pages_.release(id);
    return;
  }
  page.size = static_cast<std::uint8_t>(SLOTS - std::countl_zero(page.live));
  if (static_cast<std::uint32_t>(std::popcount(page.live)) * 2 > pages_.capacity(page)) return;
  if (page.live != low_bits(page.size)) repack(id);
  pages_.fit(id);
}

// Moves live slots together, in order.
void Holdings::repack(std::uint32_t id) {
  Page& page = pages_[id];
  std::uint64_t* const hashes = pages_.hashes(page);
  std::uint32_t to = 0;
  for (std::uint64_t left = page.live; left != 0; left &= left - 1, ++to) {
    const auto from = static_cast<std::uint32_t>(std::countr_zero(left));
    if (from == to) continue;
    hashes[to] = hashes[from];
    table_.repoint(hashes[to], position(id, from), position(id, to));
  }
  const LaneList list = pages_.lanes(id);
  for (std::uint32_t i = 0; i < list.count; ++i) list.masks[i] = pack(list.masks[i], page.live);
  page.live = low_bits(to);
  page.size = static_cast<std::uint8_t>(to);
}

// The lane holds these slots no more (all copies); its mask is the caller's to change. Returns copies dropped.
std::uint64_t Holdings::forget(std::uint32_t number, std::uint32_t id, std::uint64_t mask) {
  Lane& lane = holders_.lane_at(number);
  const std::uint64_t* const hashes = pages_.hashes(pages_[id]);
  std::uint64_t dropped = 0;
  for (std::uint64_t left = mask; left != 0; left &= left - 1) {
    const std::uint64_t hash = hashes[std::countr_zero(left)];
    lane.digest ^= hash;
    ++dropped;
    if (lane.extras == 0) continue;
    const std::uint32_t extra = copies_.get(number, hash);
    if (extra == 0) continue;
    dropped += extra;
    copies_.set(number, hash, 0);
    --lane.extras;
  }
  lane.distinct -= static_cast<std::uint64_t>(std::popcount(mask));
  lane.copies -= dropped;
  return dropped;
}

std::uint64_t Holdings::clear(const std::vector<std::uint32_t>& lanes) {
  std::uint64_t pages_left = 0;
  std::uint64_t dropped = 0;
  std::uint64_t extras = 0;
  for (const std::uint32_t number : lanes) {
    Lane& lane = holders_.lane_at(number);
    if (lane.doomed) continue;
    lane.doomed = true;
    pages_left += lane.pages;
    dropped += lane.copies;
    extras += lane.extras;
  }
  // What holds little of the index lies, as a rule, in pages touched since it came; else in the order of memory.
  const bool recent_first = pages_left < pages_.count() / 8;
  std::uint32_t next = recent_first ? pages_.most_recent() : 0;
  while (pages_left != 0) {
    const std::uint32_t id = next;
    next = recent_first ? pages_[id].older : id + 1;
    if (pages_.is_free(id)) continue;
    std::uint64_t dropped_slots = 0;
    for (const std::uint32_t number : lanes) {
      const LaneList list = pages_.lanes(id);
      const std::uint32_t index = list.find(number);
      if (index == NONE) continue;
      dropped_slots |= list.masks[index];
      drop_lane_of_page(id, index);
      --pages_left;
    }
    const std::uint64_t dead = pages_.lanes(id).unheld(dropped_slots);
    if (dead == 0) continue;
    drop_slots(id, dead);
    tidy(id);
  }
  if (extras != 0) copies_.purge([this](std::uint32_t number) { return holders_.lane_at(number).doomed; });
  for (const std::uint32_t number : lanes) {
    Lane& lane = holders_.lane_at(number);
    lane.doomed = false;
    lane.copies = lane.distinct = lane.digest = lane.truncated = 0;
    lane.extras = 0;
  }
  compact_ids(std::numeric_limits<std::uint32_t>::max());
  if (pages_.count() == 0) {
    pages_.trim();
    table_.trim();
  }
  return dropped;
}

void Holdings::snapshot(std::uint32_t number, std::vector<std::uint64_t>& hashes,
                        std::vector<std::uint32_t>& run_lengths) const {
  const Lane& lane = holders_.lane_at(number);
  hashes.reserve(lane.copies);
  std::uint32_t pages_left = lane.pages;
  for (std::uint32_t id = 0; pages_left != 0; ++id) {
    if (pages_.is_free(id)) continue;
    const LaneList list = pages_.lanes(id);
    const std::uint32_t index = list.find(number);
    if (index == NONE) continue;
    --pages_left;
    const std::uint64_t* const slots = pages_.hashes(pages_[id]);
    const std::size_t start = hashes.size();
    for (std::uint64_t left = list.masks[index]; left != 0; left &= left - 1) {
      const std::uint64_t hash = slots[std::countr_zero(left)];
      hashes.push_back(hash);
      if (lane.extras != 0) hashes.insert(hashes.end(), copies_.get(number, hash), hash);
    }
    run_lengths.push_back(static_cast<std::uint32_t>(hashes.size() - start));
  }
}

std::uint64_t Holdings::evict(std::uint32_t id) {
  std::uint64_t copies = 0;
  while (pages_[id].lane_count != 0) {
    const std::uint32_t index = pages_[id].lane_count - 1;
    const LaneList list = pages_.lanes(id);
    Lane& lane = holders_.lane_at(list.lanes[index]);
    const std::uint64_t dropped = forget(list.lanes[index], id, list.masks[index]);
    if (lane.tier != PREDICTED) {
      lane.truncated += dropped;
      copies += dropped;
    }
    drop_lane_of_page(id, index);
  }
  drop_slots(id, pages_[id].live);
  pages_.release(id);
  return copies;
}

// Over budget, pages go in order of last use until 1/32 is free again, so that this runs rarely.
void Holdings::settle(std::size_t other_bytes, Counts& counts) {
  compact_ids(ID_MOVES_MAX);
  if (bytes() + other_bytes <= bytes_max_) return;
  const std::size_t target = bytes_max_ - bytes_max_ / 32;
  std::uint64_t copies = 0;
  for (std::uint32_t sweep = 0; bytes() + other_bytes > target; ++sweep) {
    for (std::uint32_t i = 0; i <= sweep * 16 && pages_.least_recent() != NONE; ++i)
      copies += evict(pages_.victim());
    compact_ids(std::numeric_limits<std::uint32_t>::max());
    pages_.trim();
    table_.trim();
    if (pages_.least_recent() == NONE) break;
  }
  counts.evicted += copies;
  evicted_ += copies;
}

// Moves pages from the end of the id space into free ids, so that the id space shrinks with what is held.
void Holdings::compact_ids(std::uint32_t moves_max) {
  const std::uint32_t slack = FREE_IDS_SLACK + pages_.count() / 16;
  for (std::uint32_t moves = 0; moves < moves_max; ++moves) {
    const std::uint32_t from = pages_.misplaced(slack);
    if (from == NONE) return;
    const std::uint32_t to = pages_.rename(from);
    const Page& page = pages_[to];
    for (std::uint64_t left = page.live; left != 0; left &= left - 1) {
      const auto slot = static_cast<std::uint32_t>(std::countr_zero(left));
      table_.repoint(pages_.hashes(page)[slot], position(from, slot), position(to, slot));
    }
  }
}

}  // namespace kvtier::index
