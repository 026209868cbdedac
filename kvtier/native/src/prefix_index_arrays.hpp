// Reading the index's arguments: arrays of unsigned integers of one width, in place where they are buffers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "buffers.hpp"

namespace kvtier::index {

// A one-dimensional C-contiguous buffer of unsigned integers, packed little-endian bytes, or a list or tuple of ints, as
// an array. Buffers are not copied unless they are unaligned, and stay exported while this lives.
template <typename Item>
class Array {
 public:
  Array(nanobind::handle object, const char* argument) {
    if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
      from_items(object, argument);
    } else {
      from_buffer(object, argument);
    }
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  const Item* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  static std::string type_name() { return "uint" + std::to_string(sizeof(Item) * 8); }

  void from_buffer(nanobind::handle object, const char* argument) {
    view_.emplace(object, argument);
    if (!fits(object)) refuse_type(argument, "items must be of type " + type_name());
    if (view_->raw().ndim != 1) refuse_value(argument, "one dimension is needed");
    if (view_->size() % sizeof(Item) != 0) refuse_value(argument, "whole items of " + type_name() + " are needed");
    size_ = view_->size() / sizeof(Item);
    data_ = reinterpret_cast<const Item*>(view_->data());
    if (reinterpret_cast<std::uintptr_t>(data_) % alignof(Item) == 0) return;
    copied_.resize(size_);
    std::memcpy(copied_.data(), view_->data(), view_->size());
    data_ = copied_.data();
  }

  // Unsigned items of the right width; or plain bytes, which an array of uint8 is not.
  bool fits(nanobind::handle object) const {
    const Py_buffer& raw = view_->raw();
    const char* format = raw.format == nullptr ? "B" : raw.format;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    if (*format == '\0' || format[1] != '\0') return false;
    if (static_cast<std::size_t>(raw.itemsize) == sizeof(Item)) return std::strchr("BHILQN", *format) != nullptr;
    PyObject* const exporter = object.ptr();
    const bool plain = PyBytes_Check(exporter) || PyByteArray_Check(exporter) || PyMemoryView_Check(exporter);
    return plain && raw.itemsize == 1 && *format == 'B';
  }

  void from_items(nanobind::handle object, const char* argument) {
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(object.ptr()));
    PyObject** const items = PySequence_Fast_ITEMS(object.ptr());
    copied_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (!PyLong_Check(items[i])) refuse_type(argument, "items must be ints");
      const unsigned long long item = PyLong_AsUnsignedLongLong(items[i]);
      const bool failed = item == ~0ull && PyErr_Occurred() != nullptr;
      if (failed) PyErr_Clear();
      if (failed || item > static_cast<Item>(~Item{0})) refuse_value(argument, "items must fit " + type_name());
      copied_[i] = static_cast<Item>(item);
    }
    data_ = copied_.data();
    size_ = count;
  }

  std::optional<BufferView> view_;
  std::vector<Item> copied_;
  const Item* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvtier::index
