// Many instances of a class with slots, made in one call. Twin: kvtier/tiers/minting.py.
// What must not live here: what the classes mean; nothing is checked that their own constructors would check.
#include <string>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t instances_max = std::size_t{1} << 24;

// Descriptors of the slots of a class that is made as plain objects are: then nothing but its slots needs to be set.
std::vector<nb::object> slots_of(nb::handle kind) {
  if (!PyType_Check(kind.ptr()) || reinterpret_cast<PyTypeObject*>(kind.ptr())->tp_new != PyBaseObject_Type.tp_new) {
    refuse_type("kind", "must be a class whose instances are plain objects");
  }
  const nb::object names = nb::steal(PyObject_GetAttrString(kind.ptr(), "__slots__"));
  if (!names.is_valid()) {
    PyErr_Clear();
    refuse_type("kind", "has no __slots__");
  }
  if (!PyTuple_Check(names.ptr())) refuse_type("kind", "its __slots__ are no tuple");
  std::vector<nb::object> slots;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.ptr()); ++i) {
    nb::object slot = nb::steal(PyObject_GetAttr(kind.ptr(), PyTuple_GET_ITEM(names.ptr(), i)));
    if (!slot.is_valid()) {
      PyErr_Clear();
      refuse_type("kind", "lacks one of its slots");
    }
    if (!Py_IS_TYPE(slot.ptr(), &PyMemberDescr_Type)) refuse_type("kind", "one of its slots is something else");
    slots.push_back(std::move(slot));
  }
  return slots;
}

nb::object instances(nb::handle kind, nb::handle columns, nb::handle count) {
  const std::vector<nb::object> slots = slots_of(kind);
  const auto wanted = static_cast<Py_ssize_t>(integer_argument(count, "count", 0, instances_max));
  if (!PyTuple_Check(columns.ptr())) refuse_type("columns", "a tuple is needed");
  if (static_cast<std::size_t>(PyTuple_GET_SIZE(columns.ptr())) != slots.size()) {
    refuse_value("columns", std::to_string(PyTuple_GET_SIZE(columns.ptr())) + " for " + std::to_string(slots.size()) +
                                " slots");
  }
  for (std::size_t n = 0; n < slots.size(); ++n) {
    PyObject* column = PyTuple_GET_ITEM(columns.ptr(), static_cast<Py_ssize_t>(n));
    if (PyList_CheckExact(column) && PyList_GET_SIZE(column) != wanted) {
      refuse_value("columns", "one has not as many values as there are instances");
    }
  }
  auto* type = reinterpret_cast<PyTypeObject*>(kind.ptr());
  nb::object made = nb::steal(PyList_New(wanted));
  if (!made.is_valid()) nb::raise_python_error();
  for (Py_ssize_t i = 0; i < wanted; ++i) {
    PyObject* one = type->tp_alloc(type, 0);
    if (one == nullptr) nb::raise_python_error();
    PyList_SET_ITEM(made.ptr(), i, one);
    for (std::size_t n = 0; n < slots.size(); ++n) {
      PyObject* value = PyTuple_GET_ITEM(columns.ptr(), static_cast<Py_ssize_t>(n));
      if (PyList_CheckExact(value)) {
        // An allocation may collect garbage, whose finalizers are Python code that can shorten a list.
        if (i >= PyList_GET_SIZE(value)) refuse_value("columns", "one has changed meanwhile");
        value = PyList_GET_ITEM(value, i);
      }
      PyObject* slot = slots[n].ptr();
      if (Py_TYPE(slot)->tp_descr_set(slot, one, value) != 0) nb::raise_python_error();
    }
  }
  return made;
}

}  // namespace

void bind_instances(nb::module_& m) {
  m.def("instances", &instances, nb::arg("kind"), nb::arg("columns"), nb::arg("count"));
}

}  // namespace kvtier
