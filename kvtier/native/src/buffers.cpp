#include "buffers.hpp"

namespace kvtier {

namespace nb = nanobind;

void refuse_value(const char* argument, const std::string& why) {
  throw nb::value_error((std::string(argument) + ": " + why).c_str());
}

void refuse_type(const char* argument, const std::string& why) {
  throw nb::type_error((std::string(argument) + ": " + why).c_str());
}

std::size_t integer_argument(nb::handle object, const char* argument, std::size_t value_min, std::size_t value_max) {
  if (!PyLong_CheckExact(object.ptr())) {
    refuse_type(argument, std::string("an int is needed, not ") + Py_TYPE(object.ptr())->tp_name);
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  const bool inside = overflow == 0 && value >= 0 && static_cast<std::size_t>(value) >= value_min &&
                      static_cast<std::size_t>(value) <= value_max;
  if (!inside) refuse_value(argument, "outside " + std::to_string(value_min) + " .. " + std::to_string(value_max));
  return static_cast<std::size_t>(value);
}

nb::bytes new_bytes(std::size_t size) {
  nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!bytes.is_valid()) nb::raise_python_error();
  return nb::borrow<nb::bytes>(bytes);
}

std::uint8_t* contents(nb::bytes& bytes) { return reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(bytes.ptr())); }

namespace {

// Whether a struct-style format has object pointers among its items; names of fields stand between colons.
bool holds_objects(const char* format) {
  bool inside_name = false;
  for (; format != nullptr && *format != '\0'; ++format) {
    if (*format == ':') inside_name = !inside_name;
    if (*format == 'O' && !inside_name) return true;
  }
  return false;
}

}  // namespace

BufferView::BufferView(nb::handle object, const char* argument, Access access) {
  if (!PyObject_CheckBuffer(object.ptr())) {
    refuse_type(argument, std::string("a buffer is needed, not ") + Py_TYPE(object.ptr())->tp_name);
  }
  view_.reset(new Py_buffer{});
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (access == Access::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), view_.get(), flags) != 0) {
    view_->obj = nullptr;
    const bool refused = PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
                         PyErr_ExceptionMatches(PyExc_TypeError);
    if (!refused) nb::raise_python_error();
    PyErr_Clear();
    refuse_value(argument, access == Access::write ? "the buffer must be writable, C-contiguous and of plain items"
                                                   : "the buffer must be C-contiguous and of plain items");
  }
  if (!PyBuffer_IsContiguous(view_.get(), 'C')) refuse_value(argument, "the buffer must be C-contiguous");
  // Their references are counted: bytes written over them, or copied elsewhere, would crash the interpreter later.
  if (holds_objects(view_->format)) refuse_type(argument, "a buffer of Python objects is not taken");
}

IntegerArray::IntegerArray(nb::handle object, const char* argument, std::uint64_t value_max) {
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
    from_items(object, argument, value_max);
  } else if (PyObject_CheckBuffer(object.ptr())) {
    from_buffer(object, argument, value_max);
  } else {
    refuse_type(argument, std::string("an integer array, list or tuple is needed, not ") +
                              Py_TYPE(object.ptr())->tp_name);
  }
}

namespace {

[[noreturn]] void refuse_negative(const char* argument) { refuse_value(argument, "an item is negative"); }

[[noreturn]] void refuse_large(const char* argument, std::uint64_t value_max) {
  refuse_value(argument, "an item exceeds " + std::to_string(value_max));
}

enum class Sign { is_signed, is_unsigned };

// What a struct-style format says: one native-order integer of 4 or 8 bytes, or a refusal.
Sign integer_format(const Py_buffer& view, const char* argument) {
  const char* format = view.format == nullptr ? "B" : view.format;
  if (*format == '@' || *format == '=' || *format == '<') {
    ++format;
  } else if (*format == '>' || *format == '!') {
    refuse_type(argument, "big-endian arrays are not taken");
  }
  const bool one = format[0] != '\0' && format[1] == '\0';
  const bool sized = view.itemsize == 4 || view.itemsize == 8;
  if (one && sized) {
    if (std::strchr("ilqn", *format) != nullptr) return Sign::is_signed;
    if (std::strchr("ILQN", *format) != nullptr) return Sign::is_unsigned;
  }
  refuse_type(argument, std::string("4- or 8-byte integers are needed, not format '") + format + "' of " +
                            std::to_string(view.itemsize) + " bytes");
}

// Largest item read as unsigned, so that a negative one stands out; vectorises.
template <typename T>
T largest(const std::uint8_t* data, std::size_t size) {
  T seen = 0;
  for (std::size_t i = 0; i < size; ++i) {
    T item;
    std::memcpy(&item, data + i * sizeof(T), sizeof(T));
    seen = item > seen ? item : seen;
  }
  return seen;
}

std::uint64_t checked_item(PyObject* item, const char* argument, std::uint64_t value_max) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
  if (overflow < 0 || (overflow == 0 && value < 0)) refuse_negative(argument);
  if (overflow == 0) {
    if (static_cast<std::uint64_t>(value) > value_max) refuse_large(argument, value_max);
    return static_cast<std::uint64_t>(value);
  }
  const std::uint64_t large = PyLong_AsUnsignedLongLong(item);
  if (large == UINT64_MAX && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_large(argument, value_max);
  }
  if (large > value_max) refuse_large(argument, value_max);
  return large;
}

}  // namespace

void IntegerArray::from_buffer(nb::handle object, const char* argument, std::uint64_t value_max) {
  view_.emplace(object, argument);
  const Py_buffer& view = view_->raw();
  if (view.ndim != 1) refuse_value(argument, "one dimension is needed, not " + std::to_string(view.ndim));
  const Sign sign = integer_format(view, argument);
  data_ = view_->data();
  item_bytes_ = static_cast<std::size_t>(view.itemsize);
  size_ = view_->size() / item_bytes_;
  const std::uint64_t top = item_bytes_ == 4 ? std::uint64_t{1} << 31 : std::uint64_t{1} << 63;
  if (sign == Sign::is_unsigned && item_bytes_ == 4 && value_max >= UINT32_MAX) return;  // every value is good
  const std::uint64_t seen =
      item_bytes_ == 4 ? largest<std::uint32_t>(data_, size_) : largest<std::uint64_t>(data_, size_);
  if (sign == Sign::is_signed && seen >= top) refuse_negative(argument);
  if (seen > value_max) refuse_large(argument, value_max);
}

void IntegerArray::from_items(nb::handle object, const char* argument, std::uint64_t value_max) {
  // A tuple of our own: converting an item may run Python code, which may change a list under our feet.
  const nb::object items = nb::steal(PySequence_Tuple(object.ptr()));
  if (!items.is_valid()) nb::raise_python_error();
  size_ = static_cast<std::size_t>(PyTuple_GET_SIZE(items.ptr()));
  owned_.resize(size_);
  for (std::size_t i = 0; i < size_; ++i) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    if (PyLong_CheckExact(item)) {
      owned_[i] = checked_item(item, argument, value_max);
      continue;
    }
    if (PyBool_Check(item) || !PyIndex_Check(item)) {
      refuse_type(argument, std::string("an item is a ") + Py_TYPE(item)->tp_name + ", not an int");
    }
    const nb::object index = nb::steal(PyNumber_Index(item));
    if (!index.is_valid()) nb::raise_python_error();
    owned_[i] = checked_item(index.ptr(), argument, value_max);
  }
  data_ = reinterpret_cast<const std::uint8_t*>(owned_.data());
}

std::vector<std::uint64_t> IntegerArray::copied(const char* argument, std::uint64_t value_max) const {
  std::vector<std::uint64_t> values(size_);
  for (std::size_t i = 0; i < size_; ++i) {
    values[i] = (*this)[i];
    if (values[i] > value_max) refuse_large(argument, value_max);
  }
  return values;
}

}  // namespace kvtier
