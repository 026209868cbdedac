// Allocator of the fixed-size slots of an arena or pool: who is free, used, or in quarantine. Owns no memory of theirs.
// Twin: kvtier/core/slots.py.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t slots_count_max = std::size_t{1} << 31;

enum class State : std::uint8_t { free, used, quarantined };

const char* name(State state) {
  switch (state) {
    case State::free:
      return "free";
    case State::used:
      return "used";
    case State::quarantined:
      return "quarantined";
  }
  return "unknown";
}

// The slot freed last is given first (its lines may still be cached); those never used follow in ascending order, so an
// arena is touched only as far as it is needed. All methods run under the GIL and are atomic: they do all or nothing.
class SlotAllocator {
 public:
  explicit SlotAllocator(nb::handle slots_count)
      : states_(integer_argument(slots_count, "slots_count", 0, slots_count_max), State::free) {}

  nb::object allocate(nb::handle count) {
    const std::size_t wanted = integer_argument(count, "count", 0, slots_count_max);
    if (wanted > free_count()) return nb::none();
    return take(wanted);
  }

  nb::bytes allocate_up_to(nb::handle count) {
    const std::size_t wanted = integer_argument(count, "count", 0, slots_count_max);
    return take(wanted < free_count() ? wanted : free_count());
  }

  void free(nb::handle slots) {
    const auto ids = change(slots, State::used, State::free);
    used_ -= ids.size();
    give_back(ids);
  }

  void quarantine(nb::handle slots) {
    const auto ids = change(slots, State::used, State::quarantined);
    used_ -= ids.size();
    quarantined_ += ids.size();
  }

  void release_quarantine(nb::handle slots) {
    const auto ids = change(slots, State::quarantined, State::free);
    quarantined_ -= ids.size();
    give_back(ids);
  }

  std::size_t slots_count() const { return states_.size(); }
  std::size_t free_count() const { return states_.size() - used_ - quarantined_; }
  std::size_t used_count() const { return used_; }
  std::size_t quarantined_count() const { return quarantined_; }

 private:
  nb::bytes take(std::size_t count) {
    std::vector<std::uint32_t> ids(count);
    for (std::uint32_t& id : ids) {
      if (freed_.empty()) {
        id = static_cast<std::uint32_t>(untouched_++);
      } else {
        id = freed_.back();
        freed_.pop_back();
      }
      states_[id] = State::used;
    }
    used_ += count;
    return nb::bytes(ids.data(), count * sizeof(std::uint32_t));
  }

  void give_back(const std::vector<std::uint64_t>& ids) {
    for (const std::uint64_t id : ids) freed_.push_back(static_cast<std::uint32_t>(id));
  }

  // Moves all slots from one state to another, or none: the first that is not in it, or is named twice, is refused.
  std::vector<std::uint64_t> change(nb::handle slots, State from, State to) {
    const IntegerArray given(slots, "slots", UINT64_MAX);
    std::vector<std::uint64_t> ids = given.copied("slots", UINT64_MAX);
    if (to == State::free) make_room(ids.size());  // what may throw does so before any change
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const bool foreign = ids[i] >= states_.size();
      if (!foreign && states_[ids[i]] == from) {
        states_[ids[i]] = to;
        continue;
      }
      const std::string state = foreign ? "foreign" : name(states_[ids[i]]);
      for (std::size_t k = 0; k < i; ++k) states_[ids[k]] = from;
      refuse_value("slots", "slot " + std::to_string(ids[i]) + " is " + state + ", not " + name(from));
    }
    return ids;
  }

  void make_room(std::size_t count) {
    const std::size_t needed = freed_.size() + count;
    if (needed > freed_.capacity()) freed_.reserve(std::max(needed, 2 * freed_.capacity()));
  }

  std::vector<State> states_;
  std::vector<std::uint32_t> freed_;  // a stack
  std::size_t untouched_ = 0;         // slots from here on were never given
  std::size_t used_ = 0;
  std::size_t quarantined_ = 0;
};

}  // namespace

void bind_slots(nb::module_& m) {
  nb::class_<SlotAllocator>(m, "SlotAllocator")
      .def(nb::init<nb::handle>(), nb::arg("slots_count"))
      .def("allocate", &SlotAllocator::allocate, nb::arg("count"))
      .def("allocate_up_to", &SlotAllocator::allocate_up_to, nb::arg("count"))
      .def("free", &SlotAllocator::free, nb::arg("slots"))
      .def("quarantine", &SlotAllocator::quarantine, nb::arg("slots"))
      .def("release_quarantine", &SlotAllocator::release_quarantine, nb::arg("slots"))
      .def_prop_ro("slots_count", &SlotAllocator::slots_count)
      .def_prop_ro("free_count", &SlotAllocator::free_count)
      .def_prop_ro("used_count", &SlotAllocator::used_count)
      .def_prop_ro("quarantined_count", &SlotAllocator::quarantined_count);
}

}  // namespace kvtier
