#include "prefix_index_pages.hpp"

#include <cassert>

namespace kvtier::index {

namespace {

std::size_t lane_stride(std::uint32_t capacity) {
  return (capacity * (sizeof(std::uint64_t) + sizeof(std::uint32_t)) + sizeof(std::uint32_t) + 7) / 8 * 8;
}

}  // namespace

Pages::Pages(Memory& memory) : pages_(memory, sizeof(Page)) {
  for (const std::uint32_t slots : SLOT_CLASSES) hash_pools_.emplace_back(memory, (slots + 1) * sizeof(std::uint64_t));
  for (std::uint32_t i = 0; i < LANE_CLASSES_COUNT; ++i)
    lane_pools_.emplace_back(memory, lane_stride(lane_capacity(i)));
}

// 2, 3, 4, 6, 8, 12, ...
std::uint32_t Pages::lane_capacity(std::uint32_t lane_class) {
  return (lane_class % 2 == 0 ? 2u : 3u) << (lane_class / 2);
}

std::uint8_t Pages::slot_class(std::uint32_t slots) {
  std::uint8_t found = 0;
  while (SLOT_CLASSES[found] < slots) ++found;
  return found;
}

LaneList Pages::record_lanes(const Page& page) const {
  std::uint8_t* record = lane_pools_[page.lane_class].at(page.lane0);
  return {reinterpret_cast<std::uint64_t*>(record),
          reinterpret_cast<std::uint32_t*>(record + lane_capacity(page.lane_class) * sizeof(std::uint64_t)),
          page.lane_count};
}

LaneList Pages::lanes(std::uint32_t id) const {
  Page& page = (*this)[id];
  if (page.lane_count <= 1) return {&page.mask0, &page.lane0, page.lane_count};
  return record_lanes(page);
}

std::uint32_t* Pages::lane_owner(std::uint32_t lane_class, std::uint32_t record) const {
  return reinterpret_cast<std::uint32_t*>(lane_pools_[lane_class].at(record) +
                                          lane_capacity(lane_class) * (sizeof(std::uint64_t) + sizeof(std::uint32_t)));
}

std::uint32_t Pages::allocate(std::uint32_t slots) {
  if (free_ == NONE && pages_.count() == PAGES_MAX) return NONE;
  const std::uint8_t hash_class = slot_class(slots);
  const std::uint32_t record = hash_pools_[hash_class].allocate();
  std::uint32_t id = free_;
  if (id != NONE) {
    pull_free(id);
  } else {
    try {
      id = pages_.allocate();
    } catch (const std::bad_alloc&) {
      hash_pools_[hash_class].release(record);
      throw;
    }
  }
  *reinterpret_cast<std::uint64_t*>(hash_pools_[hash_class].at(record)) = id;
  (*this)[id] = Page{0, 0, NONE, 0, record, NONE, NONE, hash_class, 0, 0, 0};
  link_newest(id);
  return id;
}

void Pages::release(std::uint32_t id) {
  Page& page = (*this)[id];
  unlink(id);
  if (page.lane_count > 1) free_lanes(page.lane_class, page.lane0);
  free_hashes(page.hash_class, page.record);
  push_free(id);
}

void Pages::reserve(std::uint32_t id, std::uint32_t slots) {
  if (capacity((*this)[id]) < slots) move_hashes(id, slot_class(slots));
}

void Pages::fit(std::uint32_t id) {
  const Page& page = (*this)[id];
  const std::uint8_t fitting = slot_class(page.size);
  if (SLOT_CLASSES[fitting] * 2 <= capacity(page)) move_hashes(id, fitting);
}

void Pages::move_hashes(std::uint32_t id, std::uint8_t to) {
  Page& page = (*this)[id];
  const std::uint32_t record = hash_pools_[to].allocate();
  auto* target = reinterpret_cast<std::uint64_t*>(hash_pools_[to].at(record));
  target[0] = id;
  std::memcpy(target + 1, hashes(page), page.size * sizeof(std::uint64_t));
  free_hashes(page.hash_class, page.record);
  page.hash_class = to;
  page.record = record;
}

void Pages::free_hashes(std::uint8_t hash_class, std::uint32_t record) {
  Pool& pool = hash_pools_[hash_class];
  if (!pool.release(record)) return;
  const auto owner = static_cast<std::uint32_t>(*reinterpret_cast<std::uint64_t*>(pool.at(record)));
  (*this)[owner].record = record;
}

std::uint32_t Pages::add_lane(std::uint32_t id, std::uint32_t lane) {
  Page& page = (*this)[id];
  const std::uint32_t found = lanes(id).find(lane);
  if (found != NONE) return found;
  if (page.lane_count == 0) {
    page.lane0 = lane;
    page.mask0 = 0;
  } else {
    if (page.lane_count == 1) {
      const std::uint32_t record = allocate_lanes(0, id);
      const Page only = page;
      page.lane_class = 0;
      page.lane0 = record;
      const LaneList list = record_lanes(page);
      list.masks[0] = only.mask0;
      list.lanes[0] = only.lane0;
    } else if (page.lane_count == lane_capacity(page.lane_class)) {
      move_lanes(id, static_cast<std::uint8_t>(page.lane_class + 1));
    }
    const LaneList list = record_lanes(page);
    list.masks[page.lane_count] = 0;
    list.lanes[page.lane_count] = lane;
  }
  return page.lane_count++;
}

void Pages::remove_lane(std::uint32_t id, std::uint32_t index) {
  Page& page = (*this)[id];
  const std::uint32_t last = page.lane_count - 1;
  if (last == 0) {
    page.lane_count = 0;
    page.lane0 = NONE;
    page.mask0 = 0;
    return;
  }
  const LaneList list = record_lanes(page);
  list.masks[index] = list.masks[last];
  list.lanes[index] = list.lanes[last];
  if (last == 1) {
    const std::uint32_t record = page.lane0;
    page.mask0 = list.masks[0];
    page.lane0 = list.lanes[0];
    page.lane_count = last;
    free_lanes(page.lane_class, record);
    return;
  }
  page.lane_count = last;
  if (page.lane_class >= 2 && last * 2 <= lane_capacity(page.lane_class))
    move_lanes(id, static_cast<std::uint8_t>(page.lane_class - 1));
}

std::uint32_t Pages::allocate_lanes(std::uint32_t lane_class, std::uint32_t owner) {
  const std::uint32_t record = lane_pools_[lane_class].allocate();
  *lane_owner(lane_class, record) = owner;
  return record;
}

void Pages::move_lanes(std::uint32_t id, std::uint8_t to) {
  Page& page = (*this)[id];
  const std::uint32_t record = allocate_lanes(to, id);
  const LaneList from = record_lanes(page);
  const std::uint8_t old_class = page.lane_class;
  const std::uint32_t old_record = page.lane0;
  page.lane_class = to;
  page.lane0 = record;
  const LaneList target = record_lanes(page);
  std::memcpy(target.masks, from.masks, page.lane_count * sizeof(std::uint64_t));
  std::memcpy(target.lanes, from.lanes, page.lane_count * sizeof(std::uint32_t));
  free_lanes(old_class, old_record);
}

void Pages::free_lanes(std::uint8_t lane_class, std::uint32_t record) {
  if (lane_pools_[lane_class].release(record)) (*this)[*lane_owner(lane_class, record)].lane0 = record;
}

void Pages::touch(std::uint32_t id) {
  if (newest_ == id) return;
  unlink(id);
  link_newest(id);
}

std::uint32_t Pages::victim() {
  while ((*this)[oldest_].used != 0) {
    (*this)[oldest_].used = 0;
    touch(oldest_);
  }
  return oldest_;
}

void Pages::link_newest(std::uint32_t id) {
  Page& page = (*this)[id];
  page.newer = NONE;
  page.older = newest_;
  (newest_ == NONE ? oldest_ : (*this)[newest_].newer) = id;
  newest_ = id;
}

void Pages::unlink(std::uint32_t id) {
  const Page& page = (*this)[id];
  (page.newer == NONE ? newest_ : (*this)[page.newer].older) = page.older;
  (page.older == NONE ? oldest_ : (*this)[page.older].newer) = page.newer;
}

void Pages::push_free(std::uint32_t id) {
  Page& page = (*this)[id];
  page.hash_class = Page::FREE;
  page.live = 0;
  page.newer = NONE;
  page.older = free_;
  if (free_ != NONE) (*this)[free_].newer = id;
  free_ = id;
  ++free_count_;
}

void Pages::pull_free(std::uint32_t id) {
  const Page& page = (*this)[id];
  (page.newer == NONE ? free_ : (*this)[page.newer].older) = page.older;
  if (page.older != NONE) (*this)[page.older].newer = page.newer;
  --free_count_;
}

std::uint32_t Pages::misplaced(std::uint32_t free_slack) {
  while (free_count_ > free_slack) {
    const std::uint32_t last = pages_.count() - 1;
    if (!is_free(last)) return last;
    pull_free(last);
    pages_.release(last);
  }
  return NONE;
}

std::uint32_t Pages::rename(std::uint32_t id) {
  const std::uint32_t to = free_;
  assert(to != NONE && to != id);
  pull_free(to);
  (*this)[to] = (*this)[id];
  own(to);
  const Page& page = (*this)[to];
  (page.newer == NONE ? newest_ : (*this)[page.newer].older) = to;
  (page.older == NONE ? oldest_ : (*this)[page.older].newer) = to;
  push_free(id);
  return to;
}

void Pages::own(std::uint32_t id) {
  const Page& page = (*this)[id];
  *reinterpret_cast<std::uint64_t*>(hash_pools_[page.hash_class].at(page.record)) = id;
  if (page.lane_count > 1) *lane_owner(page.lane_class, page.lane0) = id;
}

void Pages::trim() {
  pages_.trim(0);
  for (Pool& pool : hash_pools_) pool.trim(0);
  for (Pool& pool : lane_pools_) pool.trim(0);
}

}  // namespace kvtier::index
