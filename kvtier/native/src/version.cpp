// The ABI that the Python side expects of this module, and whether the sanitizers watch it.
#include "bindings.hpp"

namespace kvtier {

#if defined(KVTIER_SANITIZED)
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

void bind_version(nanobind::module_& m) {
  m.attr("ABI_VERSION") = 1;
  m.attr("SANITIZED") = sanitized;
}

}  // namespace kvtier
