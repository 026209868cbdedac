// Python's view of the ring. Twins: kvtier/tiers/arena/ring.py.
// The segment may be written by another process at any time: nothing read from it is used for an address.
#include <atomic>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"
#include "ring.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t wait_us_max = 1'000'000;
constexpr std::uint64_t idles_max = 10;  // of one call, together
constexpr std::size_t payloads_max = std::size_t{1} << 16;

// One call at a time: what it works on is released from the interpreter's lock.
class Alone {
 public:
  explicit Alone(std::atomic_flag& flag) : flag_(flag) {
    if (flag_.test_and_set()) refuse_value("ring", "another thread is inside it");
  }
  ~Alone() { flag_.clear(); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  std::atomic_flag& flag_;
};

std::uint64_t ring_bytes_of(nb::handle ring_bytes) {
  const std::size_t bytes = integer_argument(ring_bytes, "ring_bytes", ring::bytes_min, ring::bytes_max);
  if (bytes % ring::alignment != 0) {
    refuse_value("ring_bytes", "no multiple of " + std::to_string(ring::alignment));
  }
  return bytes;
}

void require_segment(const BufferView& segment, std::uint64_t ring_bytes) {
  if (segment.size() < ring::control_bytes + ring_bytes) refuse_value("segment", "smaller than its ring");
  if (reinterpret_cast<std::uintptr_t>(segment.data()) % 64 != 0) {
    refuse_value("segment", "must be aligned to 64 bytes");
  }
}

std::vector<BufferView> sources_of(nb::handle sources) {
  if (!PyList_Check(sources.ptr()) && !PyTuple_Check(sources.ptr())) {
    refuse_type("sources", "a list or tuple of buffers is needed");
  }
  const nb::object items = nb::steal(PySequence_Tuple(sources.ptr()));  // exporting may run Python code
  if (!items.is_valid()) nb::raise_python_error();
  std::vector<BufferView> views;
  const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
  if (static_cast<std::size_t>(count) > payloads_max) refuse_value("sources", "too many");
  views.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) views.emplace_back(PyTuple_GET_ITEM(items.ptr(), i), "sources");
  return views;
}

nb::tuple answer(const std::vector<std::uint64_t>& words, ring::Status status) {
  return nb::make_tuple(nb::bytes(words.data(), words.size() * sizeof(std::uint64_t)), static_cast<int>(status));
}

class RingGiver {
 public:
  explicit RingGiver(nb::handle ring_bytes) : giver_(ring_bytes_of(ring_bytes)) {}

  nb::tuple give(nb::handle segment, nb::handle sources, nb::handle label, nb::handle wait_us) {
    BufferView memory(segment, "segment", Access::write);
    require_segment(memory, giver_.ring_bytes());
    const std::vector<BufferView> from = sources_of(sources);
    const std::size_t name = integer_argument(label, "label", 0, PY_SSIZE_T_MAX);
    const std::size_t wait = integer_argument(wait_us, "wait_us", 0, wait_us_max);
    const Alone alone(busy_);
    if (!from.empty() && !giver_.fits(from.front().size())) {
      refuse_value("sources", "the first is not the payload that was begun");
    }
    std::vector<std::uint64_t> checksums;
    checksums.reserve(from.size());
    ring::Status status = ring::Status::done;
    {
      const MaybeReleaseGil release(true);
      for (const BufferView& source : from) {
        std::uint64_t checksum = 0;
        status = giver_.give(memory.writable(), source.data(), source.size(), name, wait, checksum);
        if (giver_.is_between()) checksums.push_back(checksum);
        if (status != ring::Status::done) break;
      }
    }
    return answer(checksums, status);
  }

 private:
  ring::Giver giver_;
  std::atomic_flag busy_;
};

struct Place {
  std::uint64_t offset;
  std::uint64_t size;
};

std::vector<Place> places_of(nb::handle places, const BufferView& slots) {
  const std::vector<std::uint64_t> words = IntegerArray(places, "places", UINT64_MAX).copied("places", UINT64_MAX);
  if (words.size() % 2 != 0 || words.size() / 2 > payloads_max) refuse_value("places", "not pairs, or too many");
  std::vector<Place> found(words.size() / 2);
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i] = {words[2 * i], words[2 * i + 1]};
    if (found[i].size > static_cast<std::uint64_t>(PY_SSIZE_T_MAX)) refuse_value("places", "a size is too large");
    if (found[i].offset == ring::nowhere) continue;
    if (found[i].offset > slots.size() || found[i].size > slots.size() - found[i].offset) {
      refuse_value("places", "one is outside the slots");
    }
  }
  return found;
}

class RingTaker {
 public:
  explicit RingTaker(nb::handle ring_bytes) : taker_(ring_bytes_of(ring_bytes)) {}

  nb::tuple take(nb::handle segment, nb::handle slots, nb::handle places, nb::handle label, nb::handle bytes_max,
                 nb::handle idle_us) {
    BufferView memory(segment, "segment", Access::write);
    require_segment(memory, taker_.ring_bytes());
    BufferView target(slots, "slots", Access::write);
    if (memory.data() < target.data() + target.size() && target.data() < memory.data() + memory.size()) {
      refuse_value("slots", "overlap the segment");
    }
    const std::vector<Place> to = places_of(places, target);
    const std::size_t name = integer_argument(label, "label", 0, PY_SSIZE_T_MAX);
    const std::uint64_t bytes = integer_argument(bytes_max, "bytes_max", ring::alignment, PY_SSIZE_T_MAX);
    const std::size_t idle = integer_argument(idle_us, "idle_us", 0, wait_us_max);
    ring::Share share{bytes, idle, idles_max * idle};
    const Alone alone(busy_);
    if (!to.empty() && !taker_.fits(to.front().size)) {
      refuse_value("places", "the first is not of the payload that was begun");
    }
    std::vector<std::uint64_t> words;
    words.reserve(2 * to.size());
    ring::Status status = ring::Status::done;
    {
      const MaybeReleaseGil release(true);
      taker_.awake(memory.writable());
      for (const Place& place : to) {
        std::uint8_t* destination = place.offset == ring::nowhere ? nullptr : target.writable() + place.offset;
        ring::Taken taken;
        status = taker_.take(memory.writable(), destination, place.size, name, share, taken);
        if (status != ring::Status::done) break;
        words.push_back(taken.seen);
        words.push_back(taken.declared);
      }
    }
    return answer(words, status);
  }

  bool is_between() const { return taker_.is_between(); }

 private:
  ring::Taker taker_;
  std::atomic_flag busy_;
};

}  // namespace

void bind_ring(nb::module_& m) {
  nb::class_<RingGiver>(m, "RingGiver")
      .def(nb::init<nb::handle>(), nb::arg("ring_bytes"))
      .def("give", &RingGiver::give, nb::arg("segment"), nb::arg("sources"), nb::arg("label"),
           nb::arg("wait_us"));
  nb::class_<RingTaker>(m, "RingTaker")
      .def(nb::init<nb::handle>(), nb::arg("ring_bytes"))
      .def("take", &RingTaker::take, nb::arg("segment"), nb::arg("slots"), nb::arg("places"), nb::arg("label"),
           nb::arg("bytes_max"), nb::arg("idle_us"))
      .def_prop_ro("is_between", &RingTaker::is_between);
}

}  // namespace kvtier
