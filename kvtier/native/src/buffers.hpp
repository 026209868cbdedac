// Reading Python arguments without copying: any C-contiguous buffer as bytes, any integer array or list as integers.
// What must not live here: anything that computes. Errors are ValueError or TypeError that name the argument.
#pragma once

#include <nanobind/nanobind.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvtier {

static_assert(std::endian::native == std::endian::little, "kvtier's byte formats assume a little-endian machine");

[[noreturn]] void refuse_value(const char* argument, const std::string& why);
[[noreturn]] void refuse_type(const char* argument, const std::string& why);

// One int argument within bounds; a bool is not one.
std::size_t integer_argument(nanobind::handle object, const char* argument, std::size_t value_min,
                             std::size_t value_max);

// A new bytes object of `size` bytes to be written before anybody else sees it.
nanobind::bytes new_bytes(std::size_t size);
std::uint8_t* contents(nanobind::bytes& bytes);

enum class Access { read, write };

// Holds one exported buffer for the time of a call. Only C-contiguous ones without Python objects in them are taken; the
// export keeps the memory alive while the GIL is released.
class BufferView {
 public:
  BufferView(nanobind::handle object, const char* argument, Access access = Access::read);

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_->buf); }
  std::uint8_t* writable() { return static_cast<std::uint8_t*>(view_->buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_->len); }
  const Py_buffer& raw() const { return *view_; }

 private:
  struct Release {
    void operator()(Py_buffer* view) const {
      PyBuffer_Release(view);  // does nothing where nothing was exported
      delete view;
    }
  };
  std::unique_ptr<Py_buffer, Release> view_;  // on the heap: some exporters let `shape` point into the struct itself
};

// A one-dimensional array of unsigned integers up to `value_max`, every one of them checked when it is built. Takes 4- or
// 8-byte integer buffers without copying (any alignment), and lists or tuples of ints by copying.
class IntegerArray {
 public:
  IntegerArray(nanobind::handle object, const char* argument, std::uint64_t value_max);

  std::size_t size() const { return size_; }
  std::size_t item_bytes() const { return item_bytes_; }
  const std::uint8_t* data() const { return data_; }
  std::uint64_t operator[](std::size_t i) const {
    std::uint64_t value = 0;
    std::memcpy(&value, data_ + i * item_bytes_, item_bytes_);
    return value;
  }

  // Values that address memory are copied first and checked afterwards, against `value_max` and by the caller: the array
  // itself may be written by another thread, or be part of what the call writes.
  std::vector<std::uint64_t> copied(const char* argument, std::uint64_t value_max) const;

 private:
  void from_buffer(nanobind::handle object, const char* argument, std::uint64_t value_max);
  void from_items(nanobind::handle object, const char* argument, std::uint64_t value_max);

  std::optional<BufferView> view_;
  std::vector<std::uint64_t> owned_;
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t item_bytes_ = 8;
};

// Releases the GIL where the work is worth it: giving it up costs little, but getting it back may cost a switch interval.
class MaybeReleaseGil {
 public:
  explicit MaybeReleaseGil(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
  MaybeReleaseGil(const MaybeReleaseGil&) = delete;
  MaybeReleaseGil& operator=(const MaybeReleaseGil&) = delete;
  ~MaybeReleaseGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

}  // namespace kvtier
