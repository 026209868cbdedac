// Tokens of ASCII text for byte-level BPEs: cuts words as three well-known expressions do, merges each word's bytes by
// rank, and remembers the words it met. Twin: kvtier/text/words.py, which also decides whether this fits a tokenizer.
// Every call keeps the GIL, which is what guards the memory of words.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

constexpr std::uint32_t NO_TOKEN = UINT32_MAX;
constexpr std::size_t WORD_BYTES_MAX = 128;       // merging takes the square of a word: longer ones are the tokenizer's
constexpr std::size_t MERGES_MAX = 1 << 24;
constexpr std::size_t KEPT_BYTES_MAX = 64;        // words that are worth remembering
constexpr std::size_t KEPT_SLOTS = 1 << 17;       // of a table that is emptied when it is half full
constexpr std::uint32_t KEPT_WORDS_MAX = KEPT_SLOTS / 2;

enum Class : std::uint8_t { OTHER, LETTER, DIGIT, SPACE, LINE_END };

constexpr std::array<Class, 128> classes() {
  std::array<Class, 128> found{};
  for (std::size_t c = 0; c < 128; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    found[c] = letter ? LETTER : c >= '0' && c <= '9' ? DIGIT : OTHER;
  }
  for (const char c : {' ', '\t', '\v', '\f'}) found[static_cast<std::size_t>(c)] = SPACE;
  for (const char c : {'\n', '\r'}) found[static_cast<std::size_t>(c)] = LINE_END;
  return found;
}

constexpr std::array<Class, 128> CLASSES = classes();

bool is_space(Class kind) { return kind == SPACE || kind == LINE_END; }

// How a text falls into words.
struct Cut {
  bool is_gpt2;             // else Llama 3's
  std::size_t digits_most;  // Llama 3's: digits of a word
};

// Cuts one word off the front of what is left.
class Cutter {
 public:
  Cutter(Cut cut, const char* at, const char* end) : cut_(cut), at_(at), end_(end) {}

  bool done() const { return at_ == end_; }

  std::string_view next() {
    const char* const start = at_;
    at_ = cut_.is_gpt2 ? gpt2() : llama3();
    return {start, static_cast<std::size_t>(at_ - start)};
  }

 private:
  Class kind(const char* at) const { return CLASSES[static_cast<std::uint8_t>(*at)]; }
  bool is(const char* at, Class wanted) const { return at < end_ && kind(at) == wanted; }

  const char* run(const char* at, Class wanted) const {
    while (is(at, wanted)) ++at;
    return at;
  }

  const char* spaces(const char* at) const {
    while (at < end_ && is_space(kind(at))) ++at;
    return at;
  }

  // 's 't 'm 'd 're 've 'll; null where none of them stands there.
  const char* contraction(bool folds) const {
    if (*at_ != '\'' || at_ + 1 == end_) return nullptr;
    const auto letter = [folds](char c) { return static_cast<char>(folds && c >= 'A' && c <= 'Z' ? c + 32 : c); };
    const char first = letter(at_[1]);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at_ + 2;
    if (at_ + 2 == end_) return nullptr;
    const char second = letter(at_[2]);
    const bool two = (first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l');
    return two ? at_ + 3 : nullptr;
  }

  // \s+(?!\S)|\s+
  const char* blank() const {
    const char* const stop = spaces(at_);
    return stop == end_ || stop - at_ == 1 ? stop : stop - 1;
  }

  const char* gpt2() const {
    if (const char* const stop = contraction(false)) return stop;
    const char* const first = at_ + (*at_ == ' ');
    if (first < end_ && !is_space(kind(first))) return run(first, kind(first));
    return blank();
  }

  const char* llama3() const {
    if (const char* const stop = contraction(true)) return stop;
    const Class here = kind(at_);
    if (here == LETTER) return run(at_, LETTER);
    if (here != DIGIT && here != LINE_END && is(at_ + 1, LETTER)) return run(at_ + 1, LETTER);
    if (here == DIGIT) {
      const char* const stop = run(at_, DIGIT);
      return at_ + std::min(static_cast<std::size_t>(stop - at_), cut_.digits_most);
    }
    const char* const first = at_ + (*at_ == ' ');
    if (is(first, OTHER)) return run(run(first, OTHER), LINE_END);
    const char* last = spaces(at_);
    while (last != at_ && kind(last - 1) != LINE_END) --last;
    return last != at_ ? last : blank();
  }

  Cut cut_;
  const char* at_;
  const char* end_;
};

std::uint64_t hash_of(std::string_view word) {
  std::uint64_t hash = 0x9E3779B97F4A7C15u ^ word.size();
  const char* at = word.data();
  std::size_t left = word.size();
  for (; left >= 8; at += 8, left -= 8) {
    std::uint64_t part;
    std::memcpy(&part, at, 8);
    hash = (hash ^ part) * 0xBF58476D1CE4E5B9u;
    hash ^= hash >> 29;
  }
  std::uint64_t part = 0;
  std::memcpy(&part, at, left);
  hash = (hash ^ part) * 0x94D049BB133111EBu;
  return hash ^ hash >> 32;
}

class Words {
 public:
  Words(nb::handle cut, nb::handle digits, nb::handle bytes, nb::handle merges, nb::handle whole) {
    read_cut(cut, digits);
    const IntegerArray byte_ids(bytes, "bytes", UINT32_MAX);
    if (byte_ids.size() != byte_ids_.size()) refuse_value("bytes", "128 tokens are needed");
    for (std::size_t i = 0; i < byte_ids_.size(); ++i) byte_ids_[i] = static_cast<std::uint32_t>(byte_ids[i]);
    read_merges(merges);
    read_whole(whole);
    slots_.resize(KEPT_SLOTS);
  }

  // The tokens of `head` (none below 0) and of `text` from `start` on, as u32; None where only the tokenizer can tell.
  nb::object encode(nb::handle text, nb::handle start, nb::handle head) {
    if (!PyUnicode_Check(text.ptr())) refuse_type("text", "a str is needed");
    if (!PyUnicode_IS_ASCII(text.ptr())) return nb::none();
    const auto length = static_cast<std::size_t>(PyUnicode_GET_LENGTH(text.ptr()));
    const std::size_t from = integer_argument(start, "start", 0, length);
    found_.clear();
    if (!head.is_none()) found_.push_back(static_cast<std::uint32_t>(integer_argument(head, "head", 0, UINT32_MAX)));
    const auto* const data = static_cast<const char*>(static_cast<const void*>(PyUnicode_1BYTE_DATA(text.ptr())));
    if (!pieces(data + from, data + length)) return nb::none();
    nb::bytes result = new_bytes(found_.size() * sizeof(std::uint32_t));
    if (!found_.empty()) std::memcpy(contents(result), found_.data(), found_.size() * sizeof(std::uint32_t));
    return result;
  }

 private:
  struct Merge {
    std::uint32_t rank = NO_TOKEN;
    std::uint32_t token = NO_TOKEN;
  };
  struct Entry {  // of a table with open addresses: one visit of memory a look
    std::uint64_t pair = 0;
    Merge merge;  // none: empty
  };
  struct Slot {
    std::uint64_t hash = 0;
    std::uint32_t word_at = 0;
    std::uint32_t tokens_at = 0;
    std::uint16_t word_size = 0;  // 0: empty
    std::uint16_t tokens_size = 0;
  };

  void read_cut(nb::handle cut, nb::handle digits) {
    if (!PyUnicode_Check(cut.ptr())) refuse_type("cut", "a str is needed");
    const char* const given = PyUnicode_AsUTF8(cut.ptr());
    if (given == nullptr) PyErr_Clear();  // a lone surrogate
    const std::string name = given == nullptr ? "" : given;
    if (name != "gpt-2" && name != "llama-3") refuse_value("cut", "'" + name + "' is not known");
    const std::size_t most = integer_argument(digits, "digits", 0, 1 << 20);
    cut_.is_gpt2 = name == "gpt-2";
    // Of GPT-2's: a stage before it that takes every digit out by itself.
    digits_apart_ = cut_.is_gpt2 && most == 1;
    if (cut_.is_gpt2 && most > 1) refuse_value("digits", "0 or 1 for gpt-2");
    if (!cut_.is_gpt2 && most == 0) refuse_value("digits", "at least 1 for llama-3");
    cut_.digits_most = most;
  }

  void read_merges(nb::handle merges) {
    const IntegerArray triples(merges, "merges", UINT32_MAX);
    if (triples.size() % 3 != 0) refuse_value("merges", "triples are needed");
    const std::size_t count = triples.size() / 3;
    if (count > MERGES_MAX) refuse_value("merges", "too many");
    merges_.resize(std::bit_ceil(2 * count + 1));
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t pair = triples[3 * i] << 32 | triples[3 * i + 1];
      const Merge merge{static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(triples[3 * i + 2])};
      Entry& entry = merges_[place_of(pair)];
      if (entry.merge.rank == NO_TOKEN) entry = {pair, merge};  // of equal pairs the first counts
    }
  }

  void read_whole(nb::handle whole) {
    if (whole.is_none()) return;
    if (!PyDict_Check(whole.ptr())) refuse_type("whole", "a dict is needed");
    PyObject *word = nullptr, *token = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(whole.ptr(), &position, &word, &token)) {
      if (!PyBytes_Check(word) || !PyLong_CheckExact(token)) refuse_type("whole", "bytes to int are needed");
      const auto id = static_cast<std::uint32_t>(integer_argument(token, "whole", 0, UINT32_MAX - 1));
      whole_.emplace(std::string(PyBytes_AS_STRING(word), static_cast<std::size_t>(PyBytes_GET_SIZE(word))), id);
    }
  }

  bool pieces(const char* at, const char* end) {
    if (!digits_apart_) return words(at, end);
    const auto is_digit = [](char c) { return CLASSES[static_cast<std::uint8_t>(c)] == DIGIT; };
    while (at != end) {
      const char* const stop = is_digit(*at) ? at + 1 : std::find_if(at, end, is_digit);
      if (!words(at, stop)) return false;
      at = stop;
    }
    return true;
  }

  bool words(const char* at, const char* end) {
    for (Cutter cutter(cut_, at, end); !cutter.done();) {
      const std::string_view word = cutter.next();
      if (word.size() > KEPT_BYTES_MAX) {
        if (word.size() > WORD_BYTES_MAX || !merge(word)) return false;
        found_.insert(found_.end(), parts_.begin(), parts_.end());
      } else if (!known(word)) {
        return false;
      }
    }
    return true;
  }

  // Appends the tokens of a short word, remembered or merged now.
  bool known(std::string_view word) {
    const std::uint64_t hash = hash_of(word);
    std::size_t at = hash % KEPT_SLOTS;
    for (; slots_[at].word_size != 0; at = (at + 1) % KEPT_SLOTS) {
      const Slot& slot = slots_[at];
      if (slot.hash != hash || slot.word_size != word.size()) continue;
      if (std::memcmp(letters_.data() + slot.word_at, word.data(), word.size()) != 0) continue;
      const auto tokens = tokens_.begin() + slot.tokens_at;
      found_.insert(found_.end(), tokens, tokens + slot.tokens_size);
      return true;
    }
    if (!merge(word)) return false;
    found_.insert(found_.end(), parts_.begin(), parts_.end());
    if (++kept_ > KEPT_WORDS_MAX) {
      kept_ = 0;
      std::fill(slots_.begin(), slots_.end(), Slot{});
      letters_.clear();
      tokens_.clear();
      return true;
    }
    slots_[at] = {hash, static_cast<std::uint32_t>(letters_.size()), static_cast<std::uint32_t>(tokens_.size()),
                  static_cast<std::uint16_t>(word.size()), static_cast<std::uint16_t>(parts_.size())};
    letters_.insert(letters_.end(), word.begin(), word.end());
    tokens_.insert(tokens_.end(), parts_.begin(), parts_.end());
    return true;
  }

  // Puts the tokens of a word into parts_: the pair of least rank merges first, the leftmost of equals.
  bool merge(std::string_view word) {
    parts_.clear();
    if (!whole_.empty()) {
      const auto entry = whole_.find(std::string(word));
      if (entry != whole_.end()) {
        parts_.push_back(entry->second);
        return true;
      }
    }
    for (const char c : word) {
      const std::uint32_t token = byte_ids_[static_cast<std::uint8_t>(c)];
      if (token == NO_TOKEN) return false;
      parts_.push_back(token);
    }
    pairs_.clear();
    for (std::size_t i = 0; i + 1 < parts_.size(); ++i) pairs_.push_back(pair_at(i));
    while (!pairs_.empty()) {
      std::size_t best = 0;
      for (std::size_t i = 1; i < pairs_.size(); ++i)
        if (pairs_[i].rank < pairs_[best].rank) best = i;
      if (pairs_[best].rank == NO_TOKEN) break;
      const auto offset = static_cast<std::ptrdiff_t>(best);
      parts_[best] = pairs_[best].token;
      parts_.erase(parts_.begin() + offset + 1);
      pairs_.erase(pairs_.begin() + offset);
      if (best < pairs_.size()) pairs_[best] = pair_at(best);
      if (best > 0) pairs_[best - 1] = pair_at(best - 1);
    }
    return true;
  }

  Merge pair_at(std::size_t i) const {
    return merges_[place_of(std::uint64_t{parts_[i]} << 32 | parts_[i + 1])].merge;
  }

  // Where a pair is, or would be.
  std::size_t place_of(std::uint64_t pair) const {
    const std::size_t mask = merges_.size() - 1;
    std::uint64_t hash = pair * 0x9E3779B97F4A7C15u;
    std::size_t at = (hash ^ hash >> 32) & mask;
    while (merges_[at].merge.rank != NO_TOKEN && merges_[at].pair != pair) at = (at + 1) & mask;
    return at;
  }

  Cut cut_{};
  bool digits_apart_ = false;
  std::array<std::uint32_t, 128> byte_ids_{};
  std::vector<Entry> merges_;  // at most half full
  std::unordered_map<std::string, std::uint32_t> whole_;  // tokens that are words: taken before anything is merged

  std::vector<Slot> slots_;
  std::vector<char> letters_;
  std::vector<std::uint32_t> tokens_;
  std::uint32_t kept_ = 0;

  std::vector<std::uint32_t> found_;
  std::vector<std::uint32_t> parts_;
  std::vector<Merge> pairs_;
};

}  // namespace

void bind_words(nb::module_& m) {
  nb::class_<Words>(m, "Words")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(), nb::arg("cut"), nb::arg("digits"),
           nb::arg("bytes"), nb::arg("merges"), nb::arg("whole") = nb::none())
      .def("encode", &Words::encode, nb::arg("text"), nb::arg("start") = 0, nb::arg("head") = nb::none());
}

}  // namespace kvtier
