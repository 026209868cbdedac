// The ABI that the Python side expects of this module.
#include "bindings.hpp"

namespace kvtier {

void bind_version(nanobind::module_& m) { m.attr("ABI_VERSION") = 1; }

}  // namespace kvtier
