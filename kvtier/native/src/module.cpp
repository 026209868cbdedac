// kvtier._native: the measured hot loops. Each part binds itself in a file of its own; nothing else lives here.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_native, m) {
  m.doc() = "Native core of kvtier; every class and function has a pure-Python twin with the same interface.";
  kvtier::bind_prefix_index(m);
  kvtier::bind_version(m);
  kvtier::bind_chain(m);
  kvtier::bind_checksum(m);
  kvtier::bind_copy(m);
  kvtier::bind_file_copy(m);
  kvtier::bind_slots(m);
  kvtier::bind_arena(m);
  kvtier::bind_instances(m);
  kvtier::bind_words(m);
  kvtier::bind_scorer(m);
  kvtier::bind_ring(m);
}
