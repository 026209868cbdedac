// The prefix-key chain: key_i = SHA-256(key_{i-1} || tokens of block i as u32 little-endian || extras_i).
// Twin: kvtier/core/keys.py. Limits are the caller's business; memory safety is checked here.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"
#include "sha256.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::size_t key_bytes = sha256::digest_bytes;
constexpr std::size_t hash_bytes = 8;
constexpr std::size_t block_tokens_max = std::size_t{1} << 20;
constexpr std::size_t gil_kept_bytes = 8192;  // about 5 µs of hashing

struct Extra {
  std::size_t block;
  nb::bytes bytes;  // keeps the object alive while the GIL is released
  const std::uint8_t* data;
  std::size_t size;
};

// The extras of the blocks, ascending. The block that the last tokens leave unfinished may have one, which is ignored.
std::vector<Extra> read_extras(nb::handle extras, std::size_t blocks_begun) {
  std::vector<Extra> found;
  if (extras.is_none()) return found;
  if (!PyDict_Check(extras.ptr())) {
    refuse_type("extras", std::string("a dict is needed, not ") + Py_TYPE(extras.ptr())->tp_name);
  }
  PyObject *index = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(extras.ptr(), &position, &index, &value)) {  // runs no Python code, so the dict stands still
    if (!PyLong_CheckExact(index)) refuse_type("extras", "a block index is not an int");
    if (!PyBytes_Check(value)) refuse_type("extras", "a value is not bytes");
    int overflow = 0;
    const long long block = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow != 0 || block < 0 || static_cast<std::size_t>(block) >= blocks_begun) {
      refuse_value("extras", "a block index lies outside the " + std::to_string(blocks_begun) + " blocks of the tokens");
    }
    const auto* data = reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(value));
    found.push_back({static_cast<std::size_t>(block), nb::borrow<nb::bytes>(value), data,
                     static_cast<std::size_t>(PyBytes_GET_SIZE(value))});
  }
  std::sort(found.begin(), found.end(), [](const Extra& a, const Extra& b) { return a.block < b.block; });
  return found;
}

sha256::Compress compression(std::string_view path) {
  const sha256::Compress accelerated = sha256::compress_accelerated();
  if (path == "portable") return sha256::compress_portable;
  if (path == "accelerated" && accelerated != nullptr) return accelerated;
  if (path == "best") return accelerated != nullptr ? accelerated : sha256::compress_portable;
  refuse_value("path", "'" + std::string(path) + "' is not one of SHA256_PATHS");
}

void hash_tokens(sha256::Hasher& hasher, const IntegerArray& tokens, std::size_t begin, std::size_t count) {
  if (tokens.item_bytes() == 4) {
    hasher.update(tokens.data() + 4 * begin, 4 * count);
    return;
  }
  std::array<std::uint32_t, 64> narrowed;
  while (count != 0) {
    const std::size_t step = std::min(count, narrowed.size());
    for (std::size_t i = 0; i < step; ++i) narrowed[i] = static_cast<std::uint32_t>(tokens[begin + i]);
    hasher.update(reinterpret_cast<const std::uint8_t*>(narrowed.data()), 4 * step);
    begin += step;
    count -= step;
  }
}

struct Request {
  std::array<std::uint8_t, key_bytes> root;
  IntegerArray tokens;
  std::size_t block_tokens;
  std::size_t blocks;
  std::vector<Extra> extras;
  sha256::Compress compress;
};

Request read_request(nb::handle root, nb::handle tokens, nb::handle block_tokens, nb::handle extras,
                     const char* path) {
  const BufferView root_view(root, "root");
  if (root_view.size() != key_bytes) {
    refuse_value("root", std::to_string(key_bytes) + " bytes are needed, not " + std::to_string(root_view.size()));
  }
  Request request{{}, IntegerArray(tokens, "tokens", UINT32_MAX), integer_argument(block_tokens, "block_tokens", 1, block_tokens_max), 0, {},
                  compression(path)};
  std::memcpy(request.root.data(), root_view.data(), key_bytes);
  request.blocks = request.tokens.size() / request.block_tokens;
  const bool unfinished = request.tokens.size() % request.block_tokens != 0;
  request.extras = read_extras(extras, request.blocks + (unfinished ? 1 : 0));
  return request;
}

// Runs the chain; writes every hash, and every key where `keys` is not null.
void run_chain(const Request& request, std::uint8_t* keys, std::uint8_t* hashes) {
  sha256::Hasher hasher(request.compress);
  std::array<std::uint8_t, key_bytes> key = request.root;
  auto extra = request.extras.begin();
  for (std::size_t block = 0; block < request.blocks; ++block) {
    hasher.update(key.data(), key_bytes);
    hash_tokens(hasher, request.tokens, block * request.block_tokens, request.block_tokens);
    if (extra != request.extras.end() && extra->block == block) {
      hasher.update(extra->data, extra->size);
      ++extra;
    }
    hasher.finish(key.data());
    if (keys != nullptr) std::memcpy(keys + block * key_bytes, key.data(), key_bytes);
    std::memcpy(hashes + block * hash_bytes, key.data(), hash_bytes);
  }
}

bool worth_releasing(const Request& request) {
  std::size_t work = request.blocks * (key_bytes + 4 * request.block_tokens);
  for (const Extra& extra : request.extras) work += extra.size;
  return work > gil_kept_bytes;
}

nb::tuple prefix_chain(nb::handle root, nb::handle tokens, nb::handle block_tokens, nb::handle extras,
                       const char* path) {
  const Request request = read_request(root, tokens, block_tokens, extras, path);
  nb::bytes keys = new_bytes(request.blocks * key_bytes);
  nb::bytes hashes = new_bytes(request.blocks * hash_bytes);
  {
    const MaybeReleaseGil release(worth_releasing(request));
    run_chain(request, contents(keys), contents(hashes));
  }
  return nb::make_tuple(std::move(keys), std::move(hashes));
}

nb::bytes prefix_chain_hashes(nb::handle root, nb::handle tokens, nb::handle block_tokens, nb::handle extras,
                              const char* path) {
  const Request request = read_request(root, tokens, block_tokens, extras, path);
  nb::bytes hashes = new_bytes(request.blocks * hash_bytes);
  {
    const MaybeReleaseGil release(worth_releasing(request));
    run_chain(request, nullptr, contents(hashes));
  }
  return hashes;
}

}  // namespace

void bind_chain(nb::module_& m) {
  m.attr("SHA256_PATHS") = sha256::compress_accelerated() != nullptr ? nb::make_tuple("accelerated", "portable")
                                                                       : nb::make_tuple("portable");
  m.def("prefix_chain", &prefix_chain, nb::arg("root"), nb::arg("tokens"), nb::arg("block_tokens"),
        nb::arg("extras").none() = nb::none(), nb::arg("path") = "best");
  m.def("prefix_chain_hashes", &prefix_chain_hashes, nb::arg("root"), nb::arg("tokens"), nb::arg("block_tokens"),
        nb::arg("extras").none() = nb::none(), nb::arg("path") = "best");
}

}  // namespace kvtier
