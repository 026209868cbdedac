#include "prefix_index_holders.hpp"

#include <algorithm>

#include "prefix_index_pool.hpp"

namespace kvtier::index {

void Holders::add(std::uint32_t holder, Spec spec) {
  if (holder >= holders_.size()) holders_.resize(holder + std::size_t{1});
  Holder& added = holders_[holder];
  added = Holder{};
  added.present = true;
  added.generation = ++generations_;
  added.lanes.assign(TIERS * spec.namespaces.size() + 1, NONE);
  added.spec = std::move(spec);
  list_bytes_ += list_bytes(added);
  ++count_;
  if (added.spec.kind == Kind::WORKER) {
    join_group(holder);
    return;
  }
  added.space = spaces_.acquire(added.spec.namespaces[0]);
  if (added.spec.kind == Kind::STORE) added.cell = cells_.acquire({added.spec.node, added.spec.namespaces[0]});
}

void Holders::remove(std::uint32_t holder) {
  Holder& gone = holders_[holder];
  for (const std::uint32_t lane : gone.lanes) {
    if (lane == NONE) continue;
    lanes_[lane] = Lane{};
    views_[lane] = LaneView{};
    free_lanes_.push_back(lane);
  }
  if (gone.spec.kind == Kind::WORKER) {
    leave_group(holder);
  } else {
    spaces_.release(gone.spec.namespaces[0]);
    if (gone.spec.kind == Kind::STORE) cells_.release({gone.spec.node, gone.spec.namespaces[0]});
  }
  list_bytes_ -= list_bytes(gone);
  gone = Holder{};
  --count_;
}

void Holders::join_group(std::uint32_t holder) {
  const Spec& spec = holders_[holder].spec;
  const std::uint32_t number = group_numbers_.acquire({spec.node, spec.namespaces});
  if (number >= groups_.size()) groups_.resize(number + std::size_t{1});
  Group& group = groups_[number];
  if (group.members.empty()) {
    for (const std::uint32_t space : spec.namespaces) {
      group.cells.push_back(cells_.acquire({spec.node, space}));
      group.spaces.push_back(spaces_.acquire(space));
    }
  }
  group.members.push_back(holder);
  holders_[holder].group = number;
}

void Holders::leave_group(std::uint32_t holder) {
  const Spec& spec = holders_[holder].spec;
  Group& group = groups_[holders_[holder].group];
  group.members.erase(std::find(group.members.begin(), group.members.end(), holder));
  if (!group_numbers_.release({spec.node, spec.namespaces})) return;
  for (const std::uint32_t space : spec.namespaces) {
    cells_.release({spec.node, space});
    spaces_.release(space);
  }
  group = Group{};
}

void Holders::hide(std::uint32_t holder, bool hidden) {
  Holder& changed = holders_[holder];
  changed.hidden = hidden;
  for (const std::uint32_t lane : changed.lanes)
    if (lane != NONE) views_[lane] = view_of(lanes_[lane]);
}

std::uint32_t Holders::find_lane(std::uint32_t holder, std::uint32_t tier, std::uint32_t shard) const {
  const Holder& owner = holders_[holder];
  return owner.lanes[tier * owner.spec.namespaces.size() + shard];
}

std::uint32_t Holders::lane(std::uint32_t holder, std::uint32_t tier, std::uint32_t shard) {
  Holder& owner = holders_[holder];
  std::uint32_t& number = owner.lanes[tier * owner.spec.namespaces.size() + shard];
  if (number != NONE) return number;
  if (free_lanes_.empty()) {
    lanes_.emplace_back();
    views_.emplace_back();
    number = static_cast<std::uint32_t>(lanes_.size() - 1);
  } else {
    number = free_lanes_.back();
    free_lanes_.pop_back();
  }
  Lane& made = lanes_[number];
  made.holder = holder;
  made.shard = shard;
  made.tier = static_cast<std::uint8_t>(tier);
  made.used = true;
  views_[number] = view_of(made);
  return number;
}

LaneView Holders::view_of(const Lane& lane) const {
  const Holder& owner = holders_[lane.holder];
  if (owner.hidden) return {};
  switch (lane.tier) {
    case 0:
      return {lane.holder, 0, Role::GPU};
    case 1:
      return {owner.cell, owner.space, Role::DRAM};
    case 2:
      return {owner.cell, owner.space, Role::NVME};
    case 3:
      return {0, owner.space, Role::REDIS};
    default:
      return {lane.holder, 0, Role::PREDICTED};
  }
}

std::size_t Holders::list_bytes(const Holder& holder) {
  return (holder.lanes.capacity() + holder.spec.namespaces.capacity()) * sizeof(std::uint32_t);
}

std::size_t Holders::bytes() const {
  return holders_.capacity() * sizeof(Holder) + lanes_.capacity() * sizeof(Lane) +
         views_.capacity() * sizeof(LaneView) + groups_.capacity() * sizeof(Group) + list_bytes_;
}

}  // namespace kvtier::index
