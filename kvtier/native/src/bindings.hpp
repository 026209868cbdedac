// One bind_* function per translation unit that exports something to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

void bind_prefix_index(nanobind::module_& m);
void bind_version(nanobind::module_& m);
void bind_chain(nanobind::module_& m);
void bind_checksum(nanobind::module_& m);
void bind_copy(nanobind::module_& m);
void bind_file_copy(nanobind::module_& m);
void bind_slots(nanobind::module_& m);
void bind_arena(nanobind::module_& m);
void bind_instances(nanobind::module_& m);
void bind_words(nanobind::module_& m);
void bind_scorer(nanobind::module_& m);
void bind_ring(nanobind::module_& m);

}  // namespace kvtier
