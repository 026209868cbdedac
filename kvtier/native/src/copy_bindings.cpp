// Python's view of the block copies. Twins: kvtier/core/block_copy.py.
// Offsets and ids are copied before they are checked: their array may alias what the call writes.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"
#include "copy.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t gil_kept_bytes = 32768;  // a few microseconds
constexpr std::size_t threads_max = 64;
constexpr std::size_t streamed_block_bytes_min = 4096;

std::uintptr_t address(const std::uint8_t* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

struct Area {
  std::uintptr_t begin;
  std::uintptr_t end;
};

bool overlap(const Area& a, const Area& b) {
  const bool empty = a.begin == a.end || b.begin == b.end;
  return !empty && a.begin < b.end && b.begin < a.end;
}

Area area(const std::uint8_t* begin, std::size_t size) { return {address(begin), address(begin) + size}; }

// No destination may share a byte with another one or with any source.
void refuse_overlaps(const std::vector<Copy>& copies) {
  std::vector<Area> written;
  written.reserve(copies.size());
  for (const Copy& copy : copies) {
    if (copy.size != 0) written.push_back(area(copy.destination, copy.size));
  }
  std::sort(written.begin(), written.end(), [](const Area& a, const Area& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < written.size(); ++i) {
    if (overlap(written[i - 1], written[i])) refuse_value("destination", "two blocks overlap");
  }
  for (const Copy& copy : copies) {
    if (copy.size == 0) continue;
    const Area read = area(copy.source, copy.size);
    // Destinations are disjoint and sorted, so the first that ends behind the source's begin decides.
    const auto found = std::partition_point(written.begin(), written.end(),
                                            [&](const Area& one) { return one.end <= read.begin; });
    if (found != written.end() && overlap(*found, read)) refuse_value("destination", "overlaps the source");
  }
}

std::uint64_t copy_checksum_one(nb::handle destination, nb::handle source, const char* path) {
  const xxh3::Kernel& kernel = checksum_kernel(path);
  BufferView to(destination, "destination", Access::write);
  const BufferView from(source, "source");
  if (to.size() != from.size()) {
    refuse_value("destination", std::to_string(to.size()) + " bytes for a source of " + std::to_string(from.size()));
  }
  if (overlap(area(to.data(), to.size()), area(from.data(), from.size()))) {
    refuse_value("destination", "overlaps the source");
  }
  const MaybeReleaseGil release(to.size() > gil_kept_bytes);
  return copy_checksum(kernel, stores_for(to.size()), to.writable(), from.data(), to.size());
}

nb::bytes run_copies(const xxh3::Kernel& kernel, const std::vector<Copy>& copies, std::size_t threads) {
  refuse_overlaps(copies);
  std::vector<std::uint64_t> checksums(copies.size());
  std::size_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.size;
  {
    const MaybeReleaseGil release(bytes > gil_kept_bytes);
    copy_checksum_all(kernel, copies.data(), copies.size(), threads, checksums.data());
  }
  return nb::bytes(checksums.data(), checksums.size() * sizeof(std::uint64_t));
}

std::vector<std::uint64_t> read_offsets(nb::handle offsets, const char* argument, std::size_t buffer_bytes,
                                        std::size_t length) {
  const std::uint64_t offset_max = buffer_bytes - length;
  return IntegerArray(offsets, argument, offset_max).copied(argument, offset_max);
}

nb::bytes copy_checksum_many(nb::handle destination, nb::handle destination_offsets, nb::handle source,
                             nb::handle source_offsets, nb::handle length, nb::handle threads, const char* path) {
  const xxh3::Kernel& kernel = checksum_kernel(path);
  BufferView to(destination, "destination", Access::write);
  const BufferView from(source, "source");
  const std::size_t size = integer_argument(length, "length", 0, std::min(to.size(), from.size()));
  const std::size_t threads_count = integer_argument(threads, "threads", 1, threads_max);
  const auto to_offsets = read_offsets(destination_offsets, "destination_offsets", to.size(), size);
  const auto from_offsets = read_offsets(source_offsets, "source_offsets", from.size(), size);
  if (to_offsets.size() != from_offsets.size()) {
    refuse_value("destination_offsets", std::to_string(to_offsets.size()) + " for " +
                                            std::to_string(from_offsets.size()) + " source_offsets");
  }
  std::vector<Copy> copies(to_offsets.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    copies[i] = {to.writable() + to_offsets[i], from.data() + from_offsets[i], size};
  }
  return run_copies(kernel, copies, threads_count);
}

std::vector<BufferView> read_buffers(nb::handle sequence, const char* argument, Access access) {
  if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr())) {
    refuse_type(argument, std::string("a list or tuple of buffers is needed, not ") + Py_TYPE(sequence.ptr())->tp_name);
  }
  const nb::object items = nb::steal(PySequence_Tuple(sequence.ptr()));  // exporting may run Python code
  if (!items.is_valid()) nb::raise_python_error();
  std::vector<BufferView> views;
  const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
  views.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) views.emplace_back(PyTuple_GET_ITEM(items.ptr(), i), argument, access);
  return views;
}

nb::bytes copy_checksum_pairs(nb::handle destinations, nb::handle sources, nb::handle threads, const char* path) {
  const xxh3::Kernel& kernel = checksum_kernel(path);
  std::vector<BufferView> to = read_buffers(destinations, "destinations", Access::write);
  const std::vector<BufferView> from = read_buffers(sources, "sources", Access::read);
  const std::size_t threads_count = integer_argument(threads, "threads", 1, threads_max);
  if (to.size() != from.size()) {
    refuse_value("destinations", std::to_string(to.size()) + " for " + std::to_string(from.size()) + " sources");
  }
  std::vector<Copy> copies(to.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (to[i].size() != from[i].size()) {
      refuse_value("destinations", std::to_string(to[i].size()) + " bytes for a source of " +
                                       std::to_string(from[i].size()) + " at position " + std::to_string(i));
    }
    copies[i] = {to[i].writable(), from[i].data(), from[i].size()};
  }
  return run_copies(kernel, copies, threads_count);
}

// Block ids within the pool, copied and checked.
std::vector<std::uint64_t> read_block_ids(nb::handle block_ids, const BufferView& pool, const BufferView& data,
                                          const char* data_argument, std::size_t block_bytes) {
  if (pool.size() % block_bytes != 0) refuse_value("pool", "its size is no multiple of block_bytes");
  const std::size_t blocks = pool.size() / block_bytes;
  const IntegerArray given(block_ids, "block_ids", blocks == 0 ? 0 : blocks - 1);
  if (blocks == 0 && given.size() != 0) refuse_value("block_ids", "the pool is empty");
  if (data.size() % block_bytes != 0 || data.size() / block_bytes != given.size()) {
    refuse_value(data_argument, std::to_string(data.size()) + " bytes for " + std::to_string(given.size()) +
                                    " blocks of " + std::to_string(block_bytes));
  }
  if (overlap(area(pool.data(), pool.size()), area(data.data(), data.size()))) {
    refuse_value(data_argument, "overlaps the pool");
  }
  return given.copied("block_ids", blocks == 0 ? 0 : blocks - 1);
}

void copy_block(Stores stores, std::uint8_t* destination, const std::uint8_t* source, std::size_t size) {
  if (stores == Stores::cached || size < streamed_block_bytes_min) {
    std::memcpy(destination, source, size);
  } else {
    copy_checksum(xxh3::best(), stores, destination, source, size);  // streaming pays, the checksum rides along
  }
}

void gather_blocks(nb::handle out, nb::handle pool, nb::handle block_ids, nb::handle block_bytes) {
  const std::size_t size = integer_argument(block_bytes, "block_bytes", 1, PY_SSIZE_T_MAX);
  BufferView to(out, "out", Access::write);
  const BufferView from(pool, "pool");
  const auto ids = read_block_ids(block_ids, from, to, "out", size);
  const Stores stores = stores_for(to.size());
  const MaybeReleaseGil release(to.size() > gil_kept_bytes);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    copy_block(stores, to.writable() + i * size, from.data() + ids[i] * size, size);
  }
}

void scatter_blocks(nb::handle pool, nb::handle block_ids, nb::handle data, nb::handle block_bytes) {
  const std::size_t size = integer_argument(block_bytes, "block_bytes", 1, PY_SSIZE_T_MAX);
  BufferView to(pool, "pool", Access::write);
  const BufferView from(data, "data");
  const auto ids = read_block_ids(block_ids, to, from, "data", size);
  std::vector<std::uint64_t> sorted(ids);
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) refuse_value("block_ids", "a block id is twice");
  const Stores stores = stores_for(from.size());
  const MaybeReleaseGil release(from.size() > gil_kept_bytes);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    copy_block(stores, to.writable() + ids[i] * size, from.data() + i * size, size);
  }
}

}  // namespace

void bind_copy(nb::module_& m) {
  const auto one = nb::object(nb::int_(1));
  m.def("copy_checksum", &copy_checksum_one, nb::arg("destination"), nb::arg("source"), nb::arg("path") = "best");
  m.def("copy_checksum_many", &copy_checksum_many, nb::arg("destination"), nb::arg("destination_offsets"),
        nb::arg("source"), nb::arg("source_offsets"), nb::arg("length"), nb::arg("threads") = one,
        nb::arg("path") = "best");
  m.def("copy_checksum_pairs", &copy_checksum_pairs, nb::arg("destinations"), nb::arg("sources"),
        nb::arg("threads") = one, nb::arg("path") = "best");
  m.def("gather_blocks", &gather_blocks, nb::arg("out"), nb::arg("pool"), nb::arg("block_ids"), nb::arg("block_bytes"));
  m.def("scatter_blocks", &scatter_blocks, nb::arg("pool"), nb::arg("block_ids"), nb::arg("data"),
        nb::arg("block_bytes"));
}

}  // namespace kvtier
