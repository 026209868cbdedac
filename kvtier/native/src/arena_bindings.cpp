// Python's view of the arena's directory. Twin: kvtier/tiers/arena/directory.py.
// Names and frames are bytes objects, which nobody changes; directory and slots may be changed by another process at any
// time, so nothing read from them is used for an address before it was checked, and nothing is read twice.
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "arena.hpp"
#include "bindings.hpp"
#include "buffers.hpp"
#include "checksum.hpp"
#include "copy.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t gil_kept_bytes = 32768;  // a few microseconds
constexpr std::size_t found_bytes = 32;        // of one record of arena_find
constexpr std::size_t read_bytes = 32 + arena::frame_bytes;  // of one record of arena_read

arena::Geometry geometry_of(const BufferView& directory) {
  if (reinterpret_cast<std::uintptr_t>(directory.data()) % 64 != 0) {
    refuse_value("directory", "must be aligned to 64 bytes");
  }
  arena::Geometry geometry{};
  switch (arena::read_geometry(directory.data(), directory.size(), geometry)) {
    case arena::HeaderFault::none:
      return geometry;
    case arena::HeaderFault::small:
      refuse_value("directory", "smaller than its header says");
    case arena::HeaderFault::magic:
      refuse_value("directory", "not the directory of an arena");
    case arena::HeaderFault::abi:
      refuse_value("directory", "of another version of the layout");
    case arena::HeaderFault::counts:
      break;
  }
  refuse_value("directory", "its header says impossible sizes");
}

// One directory and the geometry it had at the beginning of the call.
struct Opened {
  BufferView view;
  arena::Geometry geometry;
  arena::Directory directory;

  Opened(nb::handle memory, Access access)
      : view(memory, "directory", access),
        geometry(geometry_of(view)),
        // Readers never write: their memory may be mapped read-only.
        directory(const_cast<std::uint8_t*>(view.data()), geometry) {}
};

std::size_t count_of(const nb::bytes& packed, const char* argument, std::size_t item_bytes) {
  if (packed.size() % item_bytes != 0) {
    refuse_value(argument, std::to_string(packed.size()) + " bytes are no multiple of " + std::to_string(item_bytes));
  }
  return packed.size() / item_bytes;
}

const std::uint8_t* item(const nb::bytes& packed, std::size_t position, std::size_t item_bytes) {
  return reinterpret_cast<const std::uint8_t*>(packed.c_str()) + position * item_bytes;
}

void require_count(std::size_t count, std::size_t wanted, const char* argument) {
  if (count != wanted) refuse_value(argument, std::to_string(count) + " for " + std::to_string(wanted) + " names");
}

void write_words(std::uint8_t* to, std::initializer_list<std::uint64_t> words) {
  for (const std::uint64_t word : words) {
    std::memcpy(to, &word, sizeof word);
    to += sizeof word;
  }
}

std::vector<std::uint64_t> entries_of(nb::handle entries, const arena::Geometry& geometry, std::size_t wanted) {
  const IntegerArray given(entries, "entries", geometry.entries_count - 1);
  require_count(given.size(), wanted, "entries");
  return given.copied("entries", geometry.entries_count - 1);
}

nb::bytes arena_publish(nb::handle directory, nb::bytes names, nb::bytes blocks) {
  Opened opened(directory, Access::write);
  const std::size_t count = count_of(names, "names", arena::name_bytes);
  require_count(count_of(blocks, "blocks", sizeof(arena::Block)), count, "blocks");
  std::vector<arena::Block> wanted(count);
  if (count != 0) std::memcpy(wanted.data(), blocks.c_str(), blocks.size());
  for (const arena::Block& block : wanted) {
    if (block.entry >= opened.geometry.entries_count) refuse_value("blocks", "an entry is outside the directory");
    if (block.slot_offset > opened.geometry.slots_bytes ||
        block.payload_bytes > opened.geometry.slots_bytes - block.slot_offset) {
      refuse_value("blocks", "a slot is outside the slots' memory");
    }
  }
  nb::bytes generations = new_bytes(8 * count);
  for (std::size_t i = 0; i < count; ++i) {
    const bool placed = opened.directory.publish(item(names, i, arena::name_bytes), wanted[i]);
    write_words(contents(generations) + 8 * i, {placed ? opened.directory.generation(wanted[i].entry) : 0});
  }
  return generations;
}

void arena_remove(nb::handle directory, nb::handle entries, nb::bytes names) {
  Opened opened(directory, Access::write);
  const std::size_t count = count_of(names, "names", arena::name_bytes);
  const std::vector<std::uint64_t> ids = entries_of(entries, opened.geometry, count);
  for (std::size_t i = 0; i < count; ++i) opened.directory.remove(ids[i], item(names, i, arena::name_bytes));
}

std::vector<arena::Found> find_all(const Opened& opened, const nb::bytes& names, std::size_t count) {
  std::vector<arena::Found> found(count);
  if (!opened.geometry.is_serving) return found;
  for (std::size_t i = 0; i < count; ++i) found[i] = opened.directory.find(item(names, i, arena::name_bytes));
  return found;
}

nb::bytes arena_find(nb::handle directory, nb::bytes names) {
  const Opened opened(directory, Access::read);
  const std::size_t count = count_of(names, "names", arena::name_bytes);
  const std::vector<arena::Found> found = find_all(opened, names, count);
  nb::bytes records = new_bytes(found_bytes * count);
  for (std::size_t i = 0; i < count; ++i) {
    const arena::Found& one = found[i];
    write_words(contents(records) + found_bytes * i,
                {one.entry, one.generation, one.slot_offset, one.frame[arena::payload_bytes_word]});
  }
  return records;
}

nb::bytes arena_unchanged(nb::handle directory, nb::handle entries, nb::handle generations) {
  const Opened opened(directory, Access::read);
  const IntegerArray wanted(generations, "generations", UINT64_MAX);
  const std::vector<std::uint64_t> ids = entries_of(entries, opened.geometry, wanted.size());
  const std::vector<std::uint64_t> expected = wanted.copied("generations", UINT64_MAX);
  nb::bytes answers = new_bytes(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    arena::Found found;
    found.entry = ids[i];
    found.generation = expected[i];
    const bool stable = expected[i] % 2 == 0 && opened.directory.is_unchanged(found);
    contents(answers)[i] = opened.geometry.is_serving && stable ? 1 : 0;
  }
  return answers;
}

// A request whose destination and slot were checked.
struct Read {
  arena::Found found;
  arena::ReadStatus status = arena::ReadStatus::miss;
  std::uint8_t* destination = nullptr;
  std::uint64_t size = 0;
};

void check_found(Read& read, const std::uint8_t* name, std::uint64_t length, std::size_t destination_bytes,
                 std::uint64_t slots_bytes) {
  if (read.found.entry == arena::nowhere) return;
  read.size = read.found.frame[arena::payload_bytes_word];
  if (!arena::is_of_name(read.found.frame, name) || read.found.slot_offset > slots_bytes ||
      read.size > slots_bytes - read.found.slot_offset) {
    read.status = arena::ReadStatus::not_the_name;
  } else if (length != arena::nowhere && length != read.size) {
    read.status = arena::ReadStatus::length;
  } else if (destination_bytes < read.size) {
    read.status = arena::ReadStatus::buffer_short;
  } else {
    read.status = arena::ReadStatus::hit;
  }
}

void copy_found(const Opened& opened, Read& read, const std::uint8_t* slots, Stores stores) {
  if (read.status != arena::ReadStatus::hit) return;
  const std::uint64_t seen =
      copy_checksum(xxh3::best(), stores, read.destination, slots + read.found.slot_offset, read.size);
  if (!opened.directory.is_unchanged(read.found)) {
    read.status = arena::ReadStatus::miss;
  } else if (seen != read.found.frame[arena::payload_checksum_word]) {
    read.status = arena::ReadStatus::payload;
  }
}

std::vector<BufferView> destinations_of(nb::handle destinations, const BufferView& directory,
                                        const BufferView& slots) {
  if (!PyList_Check(destinations.ptr()) && !PyTuple_Check(destinations.ptr())) {
    refuse_type("destinations", "a list or tuple of buffers is needed");
  }
  const nb::object items = nb::steal(PySequence_Tuple(destinations.ptr()));  // exporting may run Python code
  if (!items.is_valid()) nb::raise_python_error();
  std::vector<BufferView> views;
  const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
  views.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    views.emplace_back(PyTuple_GET_ITEM(items.ptr(), i), "destinations", Access::write);
    for (const BufferView* shared : {&directory, &slots}) {
      const BufferView& view = views.back();
      const bool apart = view.data() + view.size() <= shared->data() || shared->data() + shared->size() <= view.data();
      if (!apart && view.size() != 0) refuse_value("destinations", "one is part of the arena");
    }
  }
  return views;
}

nb::bytes arena_read(nb::handle directory, nb::handle slots, nb::bytes names, nb::handle lengths,
                     nb::handle destinations) {
  const Opened opened(directory, Access::read);
  const BufferView slots_view(slots, "slots");
  if (slots_view.size() < opened.geometry.slots_bytes) refuse_value("slots", "smaller than the directory says");
  const std::size_t count = count_of(names, "names", arena::name_bytes);
  const IntegerArray given(lengths, "lengths", UINT64_MAX);
  require_count(given.size(), count, "lengths");
  const std::vector<std::uint64_t> wanted = given.copied("lengths", UINT64_MAX);
  std::vector<BufferView> targets = destinations_of(destinations, opened.view, slots_view);
  require_count(targets.size(), count, "destinations");
  std::vector<Read> reads(count);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) bytes += targets[i].size();
  {
    const MaybeReleaseGil release(bytes > gil_kept_bytes);
    const std::vector<arena::Found> found = find_all(opened, names, count);
    for (std::size_t i = 0; i < count; ++i) {
      reads[i].found = found[i];
      reads[i].destination = targets[i].writable();
      check_found(reads[i], item(names, i, arena::name_bytes), wanted[i], targets[i].size(),
                  opened.geometry.slots_bytes);
    }
    for (Read& read : reads) copy_found(opened, read, slots_view.data(), stores_for(bytes));
  }
  nb::bytes records = new_bytes(read_bytes * count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t* to = contents(records) + read_bytes * i;
    const arena::Found& one = reads[i].found;
    write_words(to, {static_cast<std::uint64_t>(reads[i].status), one.entry, one.generation, one.slot_offset});
    std::memcpy(to + 32, one.frame.data(), arena::frame_bytes);
  }
  return records;
}

nb::bytes arena_offsets(nb::handle segment, nb::handle payloads) {
  const BufferView within(segment, "segment");
  if (!PyList_Check(payloads.ptr()) && !PyTuple_Check(payloads.ptr())) {
    refuse_type("payloads", "a list or tuple of buffers is needed");
  }
  const nb::object items = nb::steal(PySequence_Tuple(payloads.ptr()));  // exporting may run Python code
  if (!items.is_valid()) nb::raise_python_error();
  const std::size_t count = static_cast<std::size_t>(PyTuple_GET_SIZE(items.ptr()));
  nb::bytes offsets = new_bytes(8 * count);
  for (std::size_t i = 0; i < count; ++i) {
    const BufferView payload(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)), "payloads");
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(within.data());
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(payload.data());
    const bool inside = at >= begin && payload.size() <= within.size() && at - begin <= within.size() - payload.size();
    write_words(contents(offsets) + 8 * i, {payload.size() == 0 ? 0 : inside ? at - begin : arena::nowhere});
  }
  return offsets;
}

}  // namespace

void bind_arena(nb::module_& m) {
  m.attr("ARENA_ABI_VERSION") = arena::abi_version;
  m.def("arena_publish", &arena_publish, nb::arg("directory"), nb::arg("names"), nb::arg("blocks"));
  m.def("arena_remove", &arena_remove, nb::arg("directory"), nb::arg("entries"), nb::arg("names"));
  m.def("arena_find", &arena_find, nb::arg("directory"), nb::arg("names"));
  m.def("arena_unchanged", &arena_unchanged, nb::arg("directory"), nb::arg("entries"), nb::arg("generations"));
  m.def("arena_offsets", &arena_offsets, nb::arg("segment"), nb::arg("payloads"));
  m.def("arena_read", &arena_read, nb::arg("directory"), nb::arg("slots"), nb::arg("names"), nb::arg("lengths"),
        nb::arg("destinations"));
}

}  // namespace kvtier
