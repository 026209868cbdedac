// Python's view of copies out of mapped files. Twins: kvtier/tiers/nvme/cached.py.
#include <cerrno>
#include <climits>
#include <cstdint>
#include <string>

#include "bindings.hpp"
#include "buffers.hpp"
#include "file_copy.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t bytes_max = std::size_t{1} << 40;
constexpr std::size_t offset_max = std::size_t{1} << 62;

bool overlap(const BufferView& a, const BufferView& b) {
  const bool empty = a.size() == 0 || b.size() == 0;
  return !empty && a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

FileCopied copied(nb::handle descriptor, nb::handle offset, nb::handle head, nb::handle body, Residency residency) {
  const std::size_t file = integer_argument(descriptor, "descriptor", 0, INT_MAX);
  const std::size_t at = integer_argument(offset, "offset", 0, offset_max);
  BufferView first(head, "head", Access::write);
  BufferView rest(body, "body", Access::write);
  if (first.size() > bytes_max || rest.size() > bytes_max) refuse_value("body", "too long");
  if (first.size() + rest.size() == 0) refuse_value("body", "there is nothing to copy");
  if (overlap(first, rest)) refuse_value("body", "overlaps the head");
  const FileCopy wanted{static_cast<int>(file), at, first.writable(), first.size(), rest.writable(), rest.size()};
  FileCopied result{};
  {
    const MaybeReleaseGil release(true);  // a page may come from the disk
    result = copy_from_file(xxh3::best(), wanted, residency);
  }
  if (result.error != 0) {
    errno = result.error;
    PyErr_SetFromErrno(PyExc_OSError);
    nb::raise_python_error();
  }
  return result;
}

nb::int_ copy_from_file_any(nb::handle descriptor, nb::handle offset, nb::handle head, nb::handle body) {
  return nb::int_(copied(descriptor, offset, head, body, Residency::any).checksum);
}

nb::object copy_from_file_cached(nb::handle descriptor, nb::handle offset, nb::handle head, nb::handle body) {
  const FileCopied result = copied(descriptor, offset, head, body, Residency::cached);
  if (result.is_absent) return nb::none();
  return nb::int_(result.checksum);
}

bool warm(nb::handle descriptor, nb::handle offset, nb::handle size) {
  const std::size_t file = integer_argument(descriptor, "descriptor", 0, INT_MAX);
  const std::size_t at = integer_argument(offset, "offset", 0, offset_max);
  const std::size_t wanted = integer_argument(size, "size", 1, bytes_max);
  const MaybeReleaseGil release(true);
  return warm_from_file(static_cast<int>(file), at, wanted);
}

}  // namespace

void bind_file_copy(nb::module_& m) {
  m.def("copy_from_file", &copy_from_file_any, nb::arg("descriptor"), nb::arg("offset"), nb::arg("head"),
        nb::arg("body"));
  m.def("copy_from_file_cached", &copy_from_file_cached, nb::arg("descriptor"), nb::arg("offset"), nb::arg("head"),
        nb::arg("body"));
  m.def("warm_from_file", &warm, nb::arg("descriptor"), nb::arg("offset"), nb::arg("size"));
}

}  // namespace kvtier
