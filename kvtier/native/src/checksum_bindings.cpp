// Python's view of the checksum.
#include <string>

#include "bindings.hpp"
#include "buffers.hpp"
#include "checksum.hpp"

namespace kvtier {

namespace nb = nanobind;

const xxh3::Kernel& checksum_kernel(const char* path) {
  const xxh3::Kernel* kernel = xxh3::find(path);
  if (kernel == nullptr) refuse_value("path", "'" + std::string(path) + "' is not one of CHECKSUM_PATHS");
  return *kernel;
}

namespace {

constexpr std::size_t gil_kept_bytes = 32768;  // a few microseconds

std::uint64_t checksum(nb::handle buffer, const char* path) {
  const xxh3::Kernel& kernel = checksum_kernel(path);
  const BufferView view(buffer, "buffer");
  const MaybeReleaseGil release(view.size() > gil_kept_bytes);
  return xxh3::hash(kernel, view.data(), view.size());
}

}  // namespace

void bind_checksum(nb::module_& m) {
  nb::list paths;
  for (const xxh3::Kernel* kernel : {xxh3::avx512(), xxh3::avx2(), &xxh3::portable}) {
    if (kernel != nullptr) paths.append(kernel->name);
  }
  m.attr("CHECKSUM_PATHS") = nb::tuple(paths);
  m.def("checksum", &checksum, nb::arg("buffer"), nb::arg("path") = "best");
}

}  // namespace kvtier
