// sparring.hpp: connects a simulator in C++ to the trainer.
//
// One header for C++17. It needs the standard library and POSIX sockets (Linux, macOS); link with -pthread. It speaks
// version 1 of the protocol (docs/protocol.md) over tcp://HOST:PORT and unix:///PATH. It does not encrypt: beyond one
// machine, use an SSH tunnel, or a bridge in Python.
//
//     struct Walk : sparring::Game { ... };            // what agents see and do; see corridor.cpp
//     int main() { Walk walk; sparring::run(walk); }   // connects to $SPARRING_ADDRESS
//
// Data are columns: one vector for a quantity of all agents, row by row. A column that is left empty is not sent, which
// means 0 for rewards, and what docs/protocol.md says for the others.
//
// License: Apache-2.0.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "sparring.hpp copies arrays as they are in memory, which has to be little-endian"
#endif

namespace sparring {

// ---------------------------------------------------------------- errors

// What was found, what was expected, and what to do. `code` is one of docs/protocol.md, or "settings", or "lost".
struct Error : std::runtime_error {
    std::string code, got, expected, remedy;

    Error(std::string code_, std::string got_, std::string expected_, std::string remedy_)
        : std::runtime_error(code_ + ": got " + got_ + "; expected " + expected_ + "; " + remedy_),
          code(std::move(code_)), got(std::move(got_)), expected(std::move(expected_)), remedy(std::move(remedy_)) {}

    // The exit status for a program that this error ends: 3 says that a restart would fail in the same way.
    int status() const { return code == "lost" ? 1 : 3; }
};

// The connection broke, or was silent for too long.
struct LinkLost : Error {
    LinkLost(std::string got_, std::string expected_, std::string remedy_)
        : Error("lost", std::move(got_), std::move(expected_), std::move(remedy_)) {}
};

// ---------------------------------------------------------------- what a game describes and reports

struct ObservationSpec {
    std::string name;                  // unique in the behavior
    std::vector<std::int64_t> shape;   // per agent, without the number of agents
    std::string kind = "vector";       // "vector", "image" [channels, height, width], "entities", "goal"
    std::string dtype = "float32";     // or "uint8", for images
};

struct BehaviorSpec {
    std::vector<ObservationSpec> observations;
    std::int64_t continuous = 0;       // number of continuous actions, each in [-1, 1]
    std::vector<std::int64_t> discrete;  // number of choices of each branch
};

// One observation of all n agents: n * (product of the shape) numbers, bytes where the spec says uint8.
using Observation = std::variant<std::vector<float>, std::vector<std::uint8_t>>;

// The n agents that need an action now.
struct Decisions {
    std::vector<std::int64_t> agents;         // [n] ids, unique within the behavior id
    std::vector<Observation> observations;    // one for each observation of the spec, in its order
    std::vector<float> rewards;               // [n] since the agent's previous decision
    std::vector<std::int64_t> groups;         // [n] 0 for none
    std::vector<float> group_rewards;         // [n]
    std::vector<std::uint8_t> masks;          // [n, choices of all branches] 1 = forbidden
    std::vector<std::int64_t> matches;        // [n]
    std::vector<float> did_continuous;        // [n, continuous] what the agent did, where the simulator decided
    std::vector<std::int32_t> did_discrete;   // [n, branches]
};

// The m agents whose episode has just ended; they may be in Decisions too, with their next episode's first decision.
struct Ends {
    std::vector<std::int64_t> agents;         // [m]
    std::vector<Observation> observations;    // the last of the episode
    std::vector<float> rewards;               // [m] since the agent's previous decision
    std::vector<std::uint8_t> interrupted;    // [m] 1 where a limit ended the episode, 0 where the task did
    std::vector<float> group_rewards;         // [m]
    std::vector<float> outcomes;              // [m] 1 won, 0.5 drawn, 0 lost
    std::vector<std::int64_t> matches;        // [m]
    std::vector<float> did_continuous;        // [m, continuous]
    std::vector<std::int32_t> did_discrete;   // [m, branches]
};

struct Report {
    std::string behavior;  // behavior id, as "Ball?team=0"
    std::optional<Decisions> decisions;
    std::optional<Ends> ends;
};

// The actions for the decisions of one behavior id, row by row in their order.
struct Actions {
    std::vector<std::int64_t> agents;      // [n]
    std::vector<float> continuous;         // [n, continuous]
    std::vector<std::int32_t> discrete;    // [n, branches]
    std::vector<std::int32_t> scripts;     // [n] which script plays instead, from 1; empty where none does
};

struct Statistic {
    std::string name;
    double value = 0;
    std::string aggregation = "average";  // or "sum", "histogram", "most_recent"
};

using Behaviors = std::map<std::string, BehaviorSpec>;      // by behavior id
using Parameters = std::map<std::string, double>;           // environment parameters; of sampled ones the first sample
using Reports = std::vector<Report>;                        // at most one for each behavior id
using ActionsById = std::map<std::string, Actions>;         // one entry for each behavior id that had decisions

// A simulator with any number of agents of one or more behaviors.
struct Game {
    virtual ~Game() = default;
    // The name of the program, for logs.
    virtual std::string name() const = 0;
    // The spec of each behavior id; called again when a report has a new one.
    virtual Behaviors behaviors() const = 0;
    // Starts new episodes for all agents and returns their first decisions. Without a seed the random source goes on.
    virtual Reports reset(const Parameters& parameters, std::optional<std::int64_t> seed) = 0;
    // Plays on with the actions. `parameters` are the present ones, which a lesson may have changed.
    virtual Reports step(const ActionsById& actions, const Parameters& parameters) = 0;
    // Statistics since the last call, to show beside the trainer's.
    virtual std::vector<Statistic> statistics() { return {}; }
    // Names of scripts with which this game can play any agent itself, by behavior name.
    virtual std::map<std::string, std::vector<std::string>> scripts() const { return {}; }
};

struct Options {
    std::string address;                     // tcp://HOST:PORT or unix:///PATH; "": $SPARRING_ADDRESS
    std::optional<std::int64_t> number;      // among the supervisor's simulators; none: $SPARRING_NUMBER
    std::optional<std::int64_t> seed;        // where the trainer's first reset has none; none: $SPARRING_SEED
    std::string credential;                  // token; "": $SPARRING_CREDENTIAL
    double connect_timeout_s = 60;           // to connect, at the start and after a loss
    bool reconnect = true;                   // false: LinkLost when a connection breaks
    bool handle_signals = true;              // SIGINT and SIGTERM say Bye; a second one ends the program
};

struct Result {
    std::map<std::string, std::int64_t> steps;  // steps reported since the start, by behavior name
    std::string reason;                         // in the Bye of either side
};

namespace detail {

constexpr std::int64_t version = 1;
constexpr std::size_t most_bytes = 67108864, most_header = 262144, most_hello = 262144;
constexpr std::size_t most_arrays = 1024, most_dimensions = 8, most_items = 65536, most_depth = 32;
constexpr double first_pause_s = 0.05, longest_pause_s = 2, longest_try_s = 5, shortest_s = 0.001;

using Clock = std::chrono::steady_clock;
inline double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

inline Error malformed(const std::string& got, const std::string& expected) {
    return Error("malformed", got, expected, "send messages in the format of docs/protocol.md");
}

inline Error refused(const std::string& code, const std::string& got, const std::string& expected) {
    return Error(code, got, expected, "correct the game; see docs/protocol.md");
}

// ---------------------------------------------------------------- a request to stop, from signals and other threads

// A pipe becomes readable with the first request, so that no wait misses one. It stays open until the program ends.
struct Stop {
    int reading = -1, writing = -1;
    std::atomic<bool> requested{false};

    Stop() {
        int ends[2];
        if (::pipe(ends) != 0) throw Error("settings", std::strerror(errno), "a pipe", "free file descriptors");
        reading = ends[0], writing = ends[1];
        for (int one : ends) ::fcntl(one, F_SETFD, FD_CLOEXEC);
    }
    void request() {
        if (requested.exchange(true)) return;
        if (::write(writing, "", 1) != 1) return;  // `requested` says it too
    }
};

inline Stop& stop() {
    static Stop one;
    return one;
}

struct StopRequested {};

}  // namespace detail

// Ends `run` with a Bye, at the game's next report at the latest; any thread may call it.
inline void request_stop() { detail::stop().request(); }

namespace detail {

class Signals {
public:
    explicit Signals(bool wanted) : wanted_(wanted) {
        stop();  // opened before a handler uses it
        struct sigaction action {};
        action.sa_handler = [](int) {
            const int before = errno;
            request_stop();
            errno = before;
        };
        action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second signal acts as usual
        for (std::size_t i = 0; wanted_ && i < 2; ++i) ::sigaction(numbers_[i], &action, &before_[i]);
    }
    ~Signals() {
        for (std::size_t i = 0; wanted_ && i < 2; ++i) ::sigaction(numbers_[i], &before_[i], nullptr);
    }
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

private:
    bool wanted_;
    const int numbers_[2] = {SIGINT, SIGTERM};
    struct sigaction before_[2] {};
};

// ---------------------------------------------------------------- MessagePack, as much of it as the protocol needs

class Packer {
public:
    std::string bytes;

    void nil() { byte(0xc0); }
    void boolean(bool value) { byte(value ? 0xc3 : 0xc2); }
    void integer(std::int64_t value) {
        if (value >= 0 && value < 128) byte(static_cast<unsigned>(value));
        else if (value < 0) byte(0xd3), big(static_cast<std::uint64_t>(value), 8);
        else byte(0xcf), big(static_cast<std::uint64_t>(value), 8);
    }
    void number(double value) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        byte(0xcb), big(bits, 8);
    }
    void text(const std::string& value) {
        if (value.size() < 32) byte(0xa0u | static_cast<unsigned>(value.size()));
        else byte(0xdb), big(value.size(), 4);
        bytes += value;
    }
    void list(std::size_t size) { head(size, 0x90, 0xdc); }
    void map(std::size_t size) { head(size, 0x80, 0xde); }

private:
    void byte(unsigned value) { bytes.push_back(static_cast<char>(value)); }
    void big(std::uint64_t value, int size) {
        for (int shift = 8 * (size - 1); shift >= 0; shift -= 8) byte(static_cast<unsigned>(value >> shift) & 0xffu);
    }
    void head(std::size_t size, unsigned small, unsigned large) {
        if (size > most_items) throw refused("too_large", std::to_string(size) + " entries", "at most 65536");
        if (size < 16) byte(small | static_cast<unsigned>(size));
        else if (size < 65536) byte(large), big(size, 2);
        else byte(large + 1), big(size, 4);
    }
};

struct Value {
    std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<Value>,
                 std::map<std::string, Value>>
        is;

    bool is_nil() const { return is.index() == 0; }
    template <class Type>
    const Type& as(const char* what) const {
        if (const Type* found = std::get_if<Type>(&is)) return *found;
        throw malformed(std::string("a message whose ") + what + " has another type", what);
    }
    double number(const char* what) const {
        if (const auto* whole = std::get_if<std::int64_t>(&is)) return static_cast<double>(*whole);
        return as<double>(what);
    }
    // A field of a map; nullptr where it is left out, or nil.
    const Value* find(const std::string& name) const {
        const auto& fields = as<std::map<std::string, Value>>("map");
        const auto found = fields.find(name);
        return found == fields.end() || found->second.is_nil() ? nullptr : &found->second;
    }
    const Value& at(const char* name) const {
        if (const Value* found = find(name)) return *found;
        throw malformed(std::string("a message without ") + name, name);
    }
    std::string text(const char* name) const {
        const Value* found = find(name);
        return found == nullptr ? "" : found->as<std::string>(name);
    }
};

class Unpacker {
public:
    Unpacker(const char* begin, std::size_t size) : at_(begin), left_(size) {}

    Value whole() {
        Value value = next(0);
        if (left_ != 0) throw malformed(std::to_string(left_) + " bytes after the header", "one MessagePack value");
        return value;
    }

private:
    const char* at_;
    std::size_t left_;

    const char* take(std::size_t size) {
        if (size > left_) throw malformed("a header that ends within a value", "one MessagePack value");
        const char* begin = at_;
        at_ += size, left_ -= size;
        return begin;
    }
    std::uint64_t big(std::size_t size) {
        const char* begin = take(size);
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < size; ++i) value = (value << 8) | static_cast<unsigned char>(begin[i]);
        return value;
    }
    // The number of entries or characters that follow: each takes a byte at least.
    std::size_t count(std::uint64_t claimed) {
        if (claimed > most_items || claimed > left_)
            throw malformed(std::to_string(claimed) + " entries in a header", "at most 65536, and all of them");
        return static_cast<std::size_t>(claimed);
    }
    Value signed_of(std::size_t size) {
        const std::uint64_t bits = big(size);
        const unsigned shift = static_cast<unsigned>(64 - 8 * size);
        return {static_cast<std::int64_t>(bits << shift) >> shift};
    }
    Value unsigned_of(std::size_t size) {
        const std::uint64_t value = big(size);
        if (value > INT64_MAX) throw malformed("a number above 2^63 - 1", "int64");
        return {static_cast<std::int64_t>(value)};
    }
    Value text(std::uint64_t size) {
        const std::size_t length = count(size);
        return {std::string(take(length), length)};
    }
    Value list(std::uint64_t size, std::size_t depth) {
        std::vector<Value> values;
        for (std::size_t left = count(size); left > 0; --left) values.push_back(next(depth + 1));
        return {std::move(values)};
    }
    Value map(std::uint64_t size, std::size_t depth) {
        std::map<std::string, Value> fields;
        for (std::size_t left = count(size); left > 0; --left) {
            std::string name = next(depth + 1).as<std::string>("key");
            if (!fields.emplace(std::move(name), next(depth + 1)).second)
                throw malformed("a key twice in a map", "each once");
        }
        return {std::move(fields)};
    }
    Value next(std::size_t depth) {
        if (depth > most_depth) throw malformed("a header nested too deep", "at most 32 levels");
        const auto first = static_cast<unsigned>(big(1));
        if (first < 0x80) return {static_cast<std::int64_t>(first)};
        if (first < 0x90) return map(first & 0x0fu, depth);
        if (first < 0xa0) return list(first & 0x0fu, depth);
        if (first < 0xc0) return text(first & 0x1fu);
        if (first >= 0xe0) return {static_cast<std::int64_t>(first) - 256};
        switch (first) {
            case 0xc0: return {};
            case 0xc2: return {false};
            case 0xc3: return {true};
            case 0xca: {
                const auto bits = static_cast<std::uint32_t>(big(4));
                float value = 0;
                std::memcpy(&value, &bits, sizeof value);
                return {static_cast<double>(value)};
            }
            case 0xcb: {
                const std::uint64_t bits = big(8);
                double value = 0;
                std::memcpy(&value, &bits, sizeof value);
                return {value};
            }
            case 0xcc: case 0xcd: case 0xce: case 0xcf: return unsigned_of(std::size_t{1} << (first - 0xcc));
            case 0xd0: case 0xd1: case 0xd2: case 0xd3: return signed_of(std::size_t{1} << (first - 0xd0));
            case 0xd9: case 0xda: case 0xdb: return text(big(std::size_t{1} << (first - 0xd9)));
            case 0xdc: case 0xdd: return list(big(std::size_t{2} << (first - 0xdc)), depth);
            case 0xde: case 0xdf: return map(big(std::size_t{2} << (first - 0xde)), depth);
            default: throw malformed("MessagePack of a type that the protocol has not", "nil, numbers, text, lists, maps");
        }
    }
};

// ---------------------------------------------------------------- messages

inline std::size_t padding(std::size_t size) { return (8 - size % 8) % 8; }

inline void append_le(std::string& bytes, std::size_t value) {
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>((value >> shift) & 0xffu));
}

inline std::size_t read_le(const char* at) {
    std::size_t value = 0;
    for (int i = 3; i >= 0; --i) value = (value << 8) | static_cast<unsigned char>(at[i]);
    return value;
}

// Builds one message: the fields of its body in `body`, arrays by `array`.
class Writer {
public:
    Packer body;

    explicit Writer(std::string type) : type_(std::move(type)) {}

    // Adds the field `name`, an array of `rows` rows with the shape `row` each.
    template <class Type>
    void array(const char* name, const char* dtype, std::size_t rows, const std::vector<std::int64_t>& row,
               const std::vector<Type>& values) {
        body.text(name);
        element(name, dtype, rows, row, values);
    }
    // Adds an optional array: nil where it is empty.
    template <class Type>
    void optional(const char* name, const char* dtype, std::size_t rows, const std::vector<std::int64_t>& row,
                  const std::vector<Type>& values) {
        if (!values.empty()) return array(name, dtype, rows, row, values);
        body.text(name), body.nil();
    }
    // Adds an array without a name, for a list.
    template <class Type>
    void element(const char* name, const char* dtype, std::size_t rows, const std::vector<std::int64_t>& row,
                 const std::vector<Type>& values) {
        std::size_t wanted = rows;
        for (std::int64_t length : row) wanted *= static_cast<std::size_t>(length);
        if (values.size() != wanted)
            throw refused("shape", std::to_string(values.size()) + " values in " + name,
                          std::to_string(wanted) + ", for " + std::to_string(rows) + " agents");
        body.integer(static_cast<std::int64_t>(count_++));
        described_.list(2), described_.text(dtype), described_.list(row.size() + 1);
        described_.integer(static_cast<std::int64_t>(rows));
        for (std::int64_t length : row) described_.integer(length);
        const std::size_t size = values.size() * sizeof(Type);
        if (size > 0) data_.append(reinterpret_cast<const char*>(values.data()), size);
        data_.append(padding(size), '\0');
    }
    std::string message() const {
        Packer header;
        header.map(3);
        header.text("type"), header.text(type_);
        header.text("body"), header.bytes += body.bytes;
        header.text("arrays"), header.list(count_), header.bytes += described_.bytes;
        const std::size_t begin = 8 + header.bytes.size(), total = begin + padding(begin) + data_.size();
        const std::size_t most = type_ == "hello" ? most_hello : most_bytes;
        if (header.bytes.size() > most_header || total > most)
            throw refused("too_large", "a message of " + std::to_string(total) + " bytes", "at most " + std::to_string(most));
        std::string message;
        message.reserve(total);
        append_le(message, total), append_le(message, header.bytes.size());
        message += header.bytes;
        message.append(padding(begin), '\0');
        return message += data_;
    }

private:
    std::string type_;
    Packer described_;
    std::string data_;
    std::size_t count_ = 0;
};

struct Array {
    std::string dtype;
    std::vector<std::size_t> shape;
    const char* data = nullptr;
    std::size_t size = 0;  // in bytes
};

struct Message {
    std::string bytes;  // arrays point into it
    std::string type;
    Value body;
    std::vector<Array> arrays;

    // The array of a field, which must have this dtype and shape.
    template <class Type>
    std::vector<Type> column(const Value& field, const char* name, const char* dtype, std::vector<std::size_t> shape) const {
        const std::int64_t index = field.as<std::int64_t>(name);
        if (index < 0 || static_cast<std::size_t>(index) >= arrays.size())
            throw malformed(std::string(name) + " in an array that is not there", "an index in arrays");
        const Array& array = arrays[static_cast<std::size_t>(index)];
        if (array.dtype != dtype || array.shape != shape)
            throw Error("shape", std::string(name) + " of another dtype or shape", "one row for each decision",
                        "answer each decision with one row of actions");
        std::vector<Type> values(array.size / sizeof(Type));
        if (array.size > 0) std::memcpy(values.data(), array.data, array.size);
        return values;
    }
};

inline std::size_t item_size(const std::string& dtype) {
    if (dtype == "<f4" || dtype == "<i4") return 4;
    if (dtype == "<i8") return 8;
    if (dtype == "|u1" || dtype == "|b1") return 1;
    throw malformed("dtype " + dtype.substr(0, 20), "<f4, |u1, |b1, <i4 or <i8");
}

// Checks the lengths at the beginning of a message, before anything of that size is allocated.
inline std::pair<std::size_t, std::size_t> check_prefix(const char* at) {
    const std::size_t total = read_le(at), header = read_le(at + 4);
    if (total > most_bytes || header > most_header)
        throw Error("too_large", "a message of " + std::to_string(total) + " bytes with a header of " + std::to_string(header),
                    "at most 67108864 and 262144", "send less at once");
    if (header == 0 || total < 8 + header) throw malformed("lengths that contradict each other", "a whole message");
    return {total, header};
}

inline std::unique_ptr<Message> parse(std::string bytes) {
    auto message = std::make_unique<Message>();
    message->bytes = std::move(bytes);
    const std::string& all = message->bytes;
    const std::size_t header = check_prefix(all.data()).second;
    const Value top = Unpacker(all.data() + 8, header).whole();
    message->type = top.at("type").as<std::string>("type");
    message->body = top.at("body");
    const auto& described = top.at("arrays").as<std::vector<Value>>("arrays");
    if (described.size() > most_arrays) throw malformed("too many arrays", "at most 1024");
    std::size_t at = 8 + header;
    at += padding(at);
    for (const Value& one : described) {
        const auto& parts = one.as<std::vector<Value>>("array");
        if (parts.size() != 2) throw malformed("an array without dtype or shape", "[dtype, shape]");
        Array array;
        array.dtype = parts[0].as<std::string>("dtype");
        array.size = item_size(array.dtype);
        const auto& shape = parts[1].as<std::vector<Value>>("shape");
        if (shape.size() > most_dimensions) throw malformed("too many dimensions", "at most 8");
        std::size_t claimed = array.size;
        for (const Value& length : shape) {
            const std::int64_t rows = length.as<std::int64_t>("length");
            if (rows < 0 || static_cast<std::uint64_t>(rows) > most_bytes) throw malformed("a shape out of range", "0 to 67108864");
            array.shape.push_back(static_cast<std::size_t>(rows));
            array.size *= array.shape.back();
            claimed *= std::max<std::size_t>(array.shape.back(), 1);
            if (claimed > most_bytes) throw malformed("an array of too many bytes", "at most 67108864");
        }
        if (at > all.size() || array.size > all.size() - at) throw malformed("arrays beyond the message", "all arrays within it");
        array.data = all.data() + at;
        at += array.size + padding(array.size);
        message->arrays.push_back(std::move(array));
    }
    if (at != all.size()) throw malformed(std::to_string(all.size()) + " bytes", std::to_string(at));
    return message;
}

// ---------------------------------------------------------------- sockets

class Descriptor {
public:
    explicit Descriptor(int number = -1) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    int number() const { return number_; }

private:
    int number_;
};

inline LinkLost lost(const std::string& got) {
    return LinkLost(got, "a trainer that answers", "see the trainer's log for the cause");
}

// Waits until a descriptor is ready, or a stop is requested; returns false where the time is over.
inline bool wait_for(int descriptor, short events, double seconds, bool stoppable) {
    const double deadline = now() + seconds;
    for (;;) {
        pollfd watched[2] = {{descriptor, events, 0}, {stop().reading, POLLIN, 0}};
        const double left = std::max(0.0, deadline - now());
        const int ready = ::poll(watched, stoppable ? 2 : 1, static_cast<int>(std::min(left * 1000 + 1, 1e9)));
        if (stoppable && stop().requested) throw StopRequested{};
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) throw lost(std::strerror(errno));
        if (ready == 0 && now() >= deadline) return false;
    }
}

inline Descriptor open_socket(int family) {
    Descriptor opened(::socket(family, SOCK_STREAM, 0));
    if (opened.number() < 0) throw lost(std::strerror(errno));
    ::fcntl(opened.number(), F_SETFD, FD_CLOEXEC);
    ::fcntl(opened.number(), F_SETFL, O_NONBLOCK);
    const int on = 1;
    if (family != AF_UNIX) ::setsockopt(opened.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
#ifdef SO_NOSIGPIPE
    ::setsockopt(opened.number(), SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    return opened;
}

inline Descriptor connected(int family, const sockaddr* address, socklen_t size, double timeout_s) {
    Descriptor opened = open_socket(family);
    if (::connect(opened.number(), address, size) == 0) return opened;
    if (errno != EINPROGRESS) throw lost(std::strerror(errno));
    if (!wait_for(opened.number(), POLLOUT, timeout_s, true)) throw lost("no answer to a connection in time");
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(opened.number(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw lost(std::strerror(error));
    return opened;
}

struct Address {
    std::string path, host, port;  // a path, or host and port

    explicit Address(const std::string& text) {
        const std::string unix_scheme = "unix://", tcp_scheme = "tcp://";
        if (text.compare(0, unix_scheme.size(), unix_scheme) == 0) {
            path = text.substr(unix_scheme.size());
            if (path.size() > 1 && path[0] == '/' && path.size() < sizeof(sockaddr_un{}.sun_path)) return;
        } else if (text.compare(0, tcp_scheme.size(), tcp_scheme) == 0) {
            const std::size_t colon = text.rfind(':');
            host = text.substr(tcp_scheme.size(), colon > tcp_scheme.size() ? colon - tcp_scheme.size() : 0);
            port = text.substr(colon + 1);
            if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
            const bool digits = std::all_of(port.begin(), port.end(), [](char one) { return one >= '0' && one <= '9'; });
            if (!host.empty() && !port.empty() && port.size() < 6 && digits) return;
        }
        throw Error("settings", "address \"" + text + "\"", "tcp://HOST:PORT, or unix:///PATH of at most 107 bytes",
                    "correct the address, or set $SPARRING_ADDRESS");
    }

    Descriptor dial(double timeout_s) const {
        if (!path.empty()) {
            sockaddr_un address{};
            address.sun_family = AF_UNIX;
            std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
            return connected(AF_UNIX, reinterpret_cast<const sockaddr*>(&address), sizeof address, timeout_s);
        }
        addrinfo wanted{}, *found = nullptr;
        wanted.ai_socktype = SOCK_STREAM;
        if (const int error = ::getaddrinfo(host.c_str(), port.c_str(), &wanted, &found); error != 0)
            throw lost(host + ": " + ::gai_strerror(error));
        const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> freed(found, ::freeaddrinfo);
        for (const addrinfo* one = found;; one = one->ai_next) {
            try {
                return connected(one->ai_family, one->ai_addr, one->ai_addrlen, timeout_s);
            } catch (const LinkLost&) {
                if (one->ai_next == nullptr) throw;
            }
        }
    }
};

// One connection. A thread sends Ping while the game computes, so that the trainer does not give it up.
class Link {
public:
    Link(Descriptor opened, double timeout_s) : socket_(std::move(opened)), timeout_s_(timeout_s), last_sent_(now()) {}

    ~Link() {
        ::shutdown(socket_.number(), SHUT_RDWR);  // the other thread may be sending
        {
            const std::lock_guard<std::mutex> held(lock_);
            closing_ = true;
        }
        wake_.notify_all();
        if (heartbeat_.joinable()) heartbeat_.join();
    }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    void keep_alive(double heartbeat_s, double timeout_s) {
        timeout_s_ = timeout_s;
        const double interval_s = std::min(heartbeat_s, timeout_s / 3);  // at least two Pings within the timeout
        heartbeat_ = std::thread([this, interval_s] { beat(interval_s); });
    }

    void send(const Writer& writer) {
        const std::string message = writer.message();
        const std::lock_guard<std::mutex> held(lock_);
        send_all(message);
    }

    // The next message but Ping, which is answered, and Pong.
    std::unique_ptr<Message> receive() {
        double silent_since = now();
        for (;;) {
            std::unique_ptr<Message> message = next();
            if (message == nullptr) {
                fill(silent_since);
                continue;
            }
            silent_since = now();
            if (message->type == "ping") {
                const Value* number = message->body.find("number");
                Writer pong("pong");
                pong.body.map(1), pong.body.text("number");
                pong.body.integer(number == nullptr ? 0 : number->as<std::int64_t>("number"));
                send(pong);
            } else if (message->type != "pong") {
                return message;
            }
        }
    }

    // Sends a last message, and reads what is unread: closing over it would lose that message.
    void finish(const Writer& last) noexcept {
        try {
            send(last);
            ::shutdown(socket_.number(), SHUT_WR);
            char dropped[4096];
            while (::recv(socket_.number(), dropped, sizeof dropped, 0) > 0) continue;
        } catch (const Error&) {
            return;  // the connection is closed already
        }
    }

private:
    Descriptor socket_;
    double timeout_s_, last_sent_;
    std::string buffer_;
    std::mutex lock_;
    std::condition_variable wake_;
    std::thread heartbeat_;
    bool closing_ = false;

    void send_all(const std::string& message) {
#ifdef MSG_NOSIGNAL
        const int flags = MSG_NOSIGNAL;
#else
        const int flags = 0;
#endif
        const double deadline = now() + timeout_s_;
        for (std::size_t sent = 0; sent < message.size();) {
            const ssize_t size = ::send(socket_.number(), message.data() + sent, message.size() - sent, flags);
            if (size > 0) sent += static_cast<std::size_t>(size);
            else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) throw lost(std::strerror(errno));
            else if (!wait_for(socket_.number(), POLLOUT, deadline - now(), false)) {
                ::shutdown(socket_.number(), SHUT_RDWR);  // nothing can follow a part of a message
                throw lost("a message not sent in time");
            }
        }
        last_sent_ = now();
    }

    std::unique_ptr<Message> next() {
        if (buffer_.size() < 8) return nullptr;
        const std::size_t total = check_prefix(buffer_.data()).first;
        if (buffer_.size() < total) return nullptr;
        std::string bytes = buffer_.substr(0, total);
        buffer_.erase(0, total);
        return parse(std::move(bytes));
    }

    // `timeout_s` bounds a silence, and a message from its first byte to its last.
    void fill(double& since) {
        if (!wait_for(socket_.number(), POLLIN, since + timeout_s_ - now(), true))
            throw lost(std::to_string(buffer_.size()) + " bytes of a message received in time");
        char received[65536];
        const ssize_t size = ::recv(socket_.number(), received, sizeof received, 0);
        if (size == 0) throw lost("the connection closed without Bye");
        if (size < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) throw lost(std::strerror(errno));
        if (size <= 0) return;
        if (buffer_.empty()) since = now();
        buffer_.append(received, static_cast<std::size_t>(size));
    }

    void beat(double interval_s) {
        std::unique_lock<std::mutex> held(lock_);
        while (!closing_) {
            const double left = last_sent_ + interval_s - now();
            if (left > 0) {
                wake_.wait_for(held, std::chrono::duration<double>(left));
                continue;
            }
            try {
                Writer ping("ping");
                ping.body.map(0);
                send_all(ping.message());
            } catch (const Error&) {
                ::shutdown(socket_.number(), SHUT_RDWR);  // who waits for the trainer notices
                return;
            }
        }
    }
};

// ---------------------------------------------------------------- the conversation

inline std::string variable(const char* name) {
    const char* found = std::getenv(name);
    return found == nullptr ? "" : found;
}

inline std::optional<std::int64_t> number_from(const char* name) {
    const std::string text = variable(name);
    if (text.empty()) return std::nullopt;
    char* end = nullptr;
    errno = 0;
    const std::int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (errno != 0 || *end != '\0') throw Error("settings", std::string("$") + name + " " + text, "a whole number", "correct it");
    return value;
}

inline std::string name_of(const std::string& behavior) { return behavior.substr(0, behavior.find('?')); }

inline void pack_steps(Packer& body, const std::map<std::string, std::int64_t>& steps) {
    body.map(steps.size());
    for (const auto& [name, count] : steps) body.text(name), body.integer(count);
}

inline void pack_behaviors(Packer& body, const Behaviors& behaviors) {
    body.map(behaviors.size());
    for (const auto& [id, spec] : behaviors) {
        body.text(id), body.map(2);
        body.text("observations"), body.list(spec.observations.size());
        for (const ObservationSpec& one : spec.observations) {
            body.map(4);
            body.text("name"), body.text(one.name);
            body.text("shape"), body.list(one.shape.size());
            for (std::int64_t length : one.shape) body.integer(length);
            body.text("dtype"), body.text(one.dtype);
            body.text("kind"), body.text(one.kind);
        }
        body.text("actions"), body.map(2);
        body.text("continuous"), body.integer(spec.continuous);
        body.text("discrete"), body.list(spec.discrete.size());
        for (std::int64_t choices : spec.discrete) body.integer(choices);
    }
}

inline void pack_observations(Writer& writer, const BehaviorSpec& spec, std::size_t rows,
                              const std::vector<Observation>& observations) {
    if (observations.size() != spec.observations.size())
        throw refused("shape", std::to_string(observations.size()) + " observations",
                      std::to_string(spec.observations.size()) + ", as in the spec");
    writer.body.text("observations"), writer.body.list(observations.size());
    for (std::size_t i = 0; i < observations.size(); ++i) {
        const ObservationSpec& one = spec.observations[i];
        const auto* floats = std::get_if<std::vector<float>>(&observations[i]);
        if ((floats != nullptr) != (one.dtype == "float32"))
            throw refused("dtype", "observation " + one.name + " of another dtype", one.dtype + ", as in the spec");
        if (floats != nullptr) writer.element(one.name.c_str(), "<f4", rows, one.shape, *floats);
        else writer.element(one.name.c_str(), "|u1", rows, one.shape, std::get<1>(observations[i]));
    }
}

template <class Type>
std::vector<Type> or_zeros(const std::vector<Type>& values, std::size_t rows) {
    return values.empty() ? std::vector<Type>(rows) : values;
}

inline void pack_report(Writer& writer, const Report& report, const BehaviorSpec& spec) {
    const std::int64_t branches = static_cast<std::int64_t>(spec.discrete.size());
    std::int64_t choices = 0;
    for (std::int64_t one : spec.discrete) choices += one;
    writer.body.map(3);
    writer.body.text("behavior"), writer.body.text(report.behavior);
    writer.body.text("decisions");
    if (report.decisions) {
        const Decisions& one = *report.decisions;
        const std::size_t rows = one.agents.size();
        writer.body.map(9);
        writer.array("agents", "<i8", rows, {}, one.agents);
        pack_observations(writer, spec, rows, one.observations);
        writer.array("rewards", "<f4", rows, {}, or_zeros(one.rewards, rows));
        writer.optional("groups", "<i8", rows, {}, one.groups);
        writer.optional("group_rewards", "<f4", rows, {}, one.group_rewards);
        writer.optional("masks", "|b1", rows, {choices}, one.masks);
        writer.optional("matches", "<i8", rows, {}, one.matches);
        writer.optional("did_continuous", "<f4", rows, {spec.continuous}, one.did_continuous);
        writer.optional("did_discrete", "<i4", rows, {branches}, one.did_discrete);
    } else {
        writer.body.nil();
    }
    writer.body.text("ends");
    if (report.ends) {
        const Ends& one = *report.ends;
        const std::size_t rows = one.agents.size();
        writer.body.map(9);
        writer.array("agents", "<i8", rows, {}, one.agents);
        pack_observations(writer, spec, rows, one.observations);
        writer.array("rewards", "<f4", rows, {}, or_zeros(one.rewards, rows));
        writer.array("interrupted", "|b1", rows, {}, or_zeros(one.interrupted, rows));
        writer.optional("group_rewards", "<f4", rows, {}, one.group_rewards);
        writer.optional("outcomes", "<f4", rows, {}, one.outcomes);
        writer.optional("matches", "<i8", rows, {}, one.matches);
        writer.optional("did_continuous", "<f4", rows, {spec.continuous}, one.did_continuous);
        writer.optional("did_discrete", "<i4", rows, {branches}, one.did_discrete);
    } else {
        writer.body.nil();
    }
}

inline void update(Parameters& parameters, const Value& body) {
    const Value* changed = body.find("parameters");
    if (changed == nullptr) return;
    for (const auto& [name, value] : changed->as<std::map<std::string, Value>>("parameters"))
        parameters[name] = value.number("parameter");
}

class Client {
public:
    Client(Game& game, Options options)
        : game_(game), options_(std::move(options)), address_(address_of(options_)), behaviors_(game.behaviors()) {
        if (options_.credential.empty()) options_.credential = variable("SPARRING_CREDENTIAL");
        if (!options_.number) options_.number = number_from("SPARRING_NUMBER");
        if (!options_.seed) options_.seed = number_from("SPARRING_SEED");
        if (address_.path.empty() && !variable("SPARRING_KEYS").empty())
            throw Error("settings", "$SPARRING_KEYS with a TCP address", "an address that is not encrypted",
                        "let the run listen at unix:///PATH, or on loopback with encrypt: false");
        std::random_device random;
        for (int i = 0; i < 16; ++i) process_.push_back("0123456789abcdef"[random() % 16]);
    }

    Result play() {
        double deadline = now() + options_.connect_timeout_s, pause_s = first_pause_s;
        begun_ = false;
        for (;;) {
            try {
                const std::string reason = converse(deadline);
                return {steps_, reason};
            } catch (const StopRequested&) {
                return {steps_, end("stopped")};
            } catch (const LinkLost& broken) {
                drop();
                if (std::exchange(begun_, false)) {  // the connection had worked: a new attempt begins
                    if (!options_.reconnect) throw;
                    deadline = now() + options_.connect_timeout_s, pause_s = first_pause_s;
                }
                if (now() >= deadline)
                    throw LinkLost("no trainer in time (last: " + broken.got + ")", "one that keeps the connection",
                                   "start the run first, or correct the address");
                if (wait_to_retry(std::min(pause_s, std::max(0.0, deadline - now())))) return {steps_, "stopped"};
                pause_s = std::min(2 * pause_s, longest_pause_s);
            } catch (const Error& error) {
                fail(error);
                throw;
            } catch (const std::exception& error) {
                end(std::string("failed: ") + error.what());
                throw;
            }
        }
    }

private:
    Game& game_;
    Options options_;
    Address address_;
    Behaviors behaviors_;
    std::set<std::string> announced_;
    std::string process_;
    std::map<std::string, std::int64_t> steps_;
    std::map<std::string, std::vector<std::int64_t>> open_;  // agents that got an action, until they are reported again
    Parameters parameters_;
    std::unique_ptr<Link> link_;
    bool begun_ = false, remote_ = false, faulted_ = false;

    static Address address_of(const Options& options) {
        return Address(options.address.empty() ? variable("SPARRING_ADDRESS") : options.address);
    }

    static bool wait_to_retry(double seconds) {
        try {
            return wait_for(-1, 0, seconds, true);
        } catch (const StopRequested&) {
            return true;
        }
    }

    void drop() {
        link_.reset();
        open_.clear();
    }

    std::string end(const std::string& reason) {
        if (link_ != nullptr) {
            Writer bye("bye");
            bye.body.map(2);
            bye.body.text("reason"), bye.body.text(reason.substr(0, 1000));
            bye.body.text("steps"), pack_steps(bye.body, steps_);
            link_->finish(bye);
        }
        drop();
        return reason;
    }

    // Reports a mistake of the trainer to it, and a mistake of the game as the reason of a Bye.
    void fail(const Error& error) {
        if (faulted_ || !remote_ || link_ == nullptr) {
            if (faulted_) drop();
            else end(std::string("failed: ") + error.what());
            return;
        }
        Writer fault("fault");
        fault.body.map(4);
        fault.body.text("code"), fault.body.text(error.code);
        fault.body.text("got"), fault.body.text(error.got);
        fault.body.text("expected"), fault.body.text(error.expected);
        fault.body.text("remedy"), fault.body.text(error.remedy);
        link_->finish(fault);
        drop();
    }

    // The next message; the trainer's Fault is an error. `remote_` says that errors are the trainer's until it returns.
    std::unique_ptr<Message> receive() {
        remote_ = true;
        std::unique_ptr<Message> message = link_->receive();
        if (message->type == "fault") {
            faulted_ = true;
            const Value& body = message->body;
            throw Error(body.text("code"), body.text("got"), body.text("expected"), body.text("remedy"));
        }
        return message;
    }

    static Error unexpected(const Message& message, const char* expected) {
        return Error("unexpected_message", "'" + message.type + "'", expected, "follow the table in docs/protocol.md");
    }

    // Leads one connection from Hello to Bye, whose reason it returns.
    std::string converse(double deadline) {
        const double left_s = std::max(deadline - now(), shortest_s);
        link_ = std::make_unique<Link>(address_.dial(std::min(left_s, longest_try_s)), left_s);
        link_->send(hello());
        std::unique_ptr<Message> message = receive();
        if (message->type == "bye") return end(message->body.text("reason"));
        if (message->type != "welcome") throw unexpected(*message, "welcome");
        const std::int64_t theirs = message->body.at("version").as<std::int64_t>("version");
        if (theirs != version) throw Error("version", "version " + std::to_string(theirs), "1", "use a kit of this version");
        const double heartbeat_s = message->body.at("heartbeat_s").number("heartbeat_s");
        const double timeout_s = message->body.at("timeout_s").number("timeout_s");
        if (!(heartbeat_s >= shortest_s && timeout_s >= shortest_s))
            throw Error("internal", "times below 0.001 s", "longer ones", "correct the trainer's times");
        link_->keep_alive(heartbeat_s, timeout_s);
        Reports reports;
        bool resets_only = true;
        for (std::int64_t sequence = 0;; ++sequence) {
            message = receive();
            begun_ = true;
            if (message->type == "bye") return end(message->body.text("reason"));
            if (message->type == "reset") {
                parameters_.clear();
                update(parameters_, message->body);
                const Value* seed = message->body.find("seed");
                std::optional<std::int64_t> given = seed == nullptr ? options_.seed : seed->as<std::int64_t>("seed");
                options_.seed.reset();  // later episodes continue the sequence of the first seed
                open_.clear();
                remote_ = false;
                reports = game_.reset(parameters_, given);
            } else if (message->type == "act" && !resets_only) {
                ActionsById actions = accept(*message, reports, sequence - 1);
                update(parameters_, message->body);
                remote_ = false;
                reports = game_.step(actions, parameters_);
            } else {
                throw unexpected(*message, resets_only ? "reset" : "act or reset");
            }
            resets_only = false;
            if (stop().requested) throw StopRequested{};
            report(reports, sequence);
        }
    }

    Writer hello() {
        Writer writer("hello");
        Packer& body = writer.body;
        body.map(8);
        body.text("version"), body.integer(version);
        body.text("name"), body.text(game_.name());
        body.text("behaviors"), pack_behaviors(body, behaviors_);
        body.text("number");
        if (options_.number) body.integer(*options_.number);
        else body.nil();
        body.text("steps"), pack_steps(body, steps_);
        body.text("credential"), body.text(options_.credential);
        const auto scripts = game_.scripts();
        body.text("scripts"), body.map(scripts.size());
        for (const auto& [name, own] : scripts) {
            body.text(name), body.list(own.size());
            for (const std::string& one : own) body.text(one);
        }
        body.text("process"), body.text(process_);
        announced_.clear();
        for (const auto& [id, spec] : behaviors_) announced_.insert(id);
        return writer;
    }

    void announce(const Reports& reports) {
        const auto is_new = [this](const Report& one) { return announced_.count(one.behavior) == 0; };
        if (std::none_of(reports.begin(), reports.end(), is_new)) return;
        Behaviors added;
        for (const auto& [id, spec] : game_.behaviors())
            if (announced_.count(id) == 0) added.emplace(id, spec);
        for (const Report& one : reports)
            if (is_new(one) && added.count(one.behavior) == 0)
                throw refused("unknown_behavior", "a report of " + one.behavior, "a behavior id that behaviors() returns");
        Writer writer("behaviors");
        writer.body.map(1), writer.body.text("behaviors");
        pack_behaviors(writer.body, added);
        link_->send(writer);
        for (const auto& [id, spec] : added) announced_.insert(id), behaviors_[id] = spec;
    }

    void report(const Reports& reports, std::int64_t sequence) {
        announce(reports);
        const std::vector<Statistic> statistics = game_.statistics();
        Writer step("step");
        step.body.map(3);
        step.body.text("sequence"), step.body.integer(sequence);
        step.body.text("reports"), step.body.list(reports.size());
        for (const Report& one : reports) pack_report(step, one, behaviors_.at(one.behavior));
        step.body.text("statistics"), step.body.list(statistics.size());
        for (const Statistic& one : statistics) {
            step.body.map(3);
            step.body.text("name"), step.body.text(one.name);
            step.body.text("value"), step.body.number(one.value);
            step.body.text("aggregation"), step.body.text(one.aggregation);
        }
        try {
            link_->send(step);
        } catch (const LinkLost&) {
            return;  // `receive` throws it again, unless the trainer has said why it closed the connection
        }
        for (const Report& one : reports) count(one);
    }

    // Counts the outcomes of acted decisions in a report that was sent.
    void count(const Report& report) {
        std::vector<std::int64_t>& waiting = open_[report.behavior];
        if (waiting.empty()) return;
        if (report.decisions && report.decisions->agents == waiting) {  // the usual case
            steps_[name_of(report.behavior)] += static_cast<std::int64_t>(waiting.size());
            return waiting.clear();
        }
        std::set<std::int64_t> seen;
        if (report.decisions) seen.insert(report.decisions->agents.begin(), report.decisions->agents.end());
        if (report.ends) seen.insert(report.ends->agents.begin(), report.ends->agents.end());
        const auto is_seen = [&seen](std::int64_t agent) { return seen.count(agent) > 0; };
        const auto rest = std::remove_if(waiting.begin(), waiting.end(), is_seen);
        steps_[name_of(report.behavior)] += waiting.end() - rest;
        waiting.erase(rest, waiting.end());
    }

    // Returns the actions of an Act, which must answer the decisions row by row.
    ActionsById accept(const Message& act, const Reports& reports, std::int64_t sequence) {
        const std::int64_t theirs = act.body.at("sequence").as<std::int64_t>("sequence");
        ActionsById all;
        for (const Value& entry : act.body.at("actions").as<std::vector<Value>>("actions")) {
            const std::string id = entry.text("behavior");
            const auto asked = std::find_if(reports.begin(), reports.end(), [&](const Report& one) {
                return one.behavior == id && one.decisions.has_value();
            });
            if (theirs != sequence || asked == reports.end() || all.count(id) > 0)
                throw Error("sequence", "act " + std::to_string(theirs) + " for " + id, "act " + std::to_string(sequence),
                            "answer the last step, and each behavior with decisions once");
            const BehaviorSpec& spec = behaviors_.at(id);
            const std::size_t rows = asked->decisions->agents.size();
            Actions actions;
            actions.agents = act.column<std::int64_t>(entry.at("agents"), "agents", "<i8", {rows});
            actions.continuous = act.column<float>(entry.at("continuous"), "continuous", "<f4",
                                                   {rows, static_cast<std::size_t>(spec.continuous)});
            actions.discrete = act.column<std::int32_t>(entry.at("discrete"), "discrete", "<i4", {rows, spec.discrete.size()});
            if (const Value* scripts = entry.find("scripts"))
                actions.scripts = act.column<std::int32_t>(*scripts, "scripts", "<i4", {rows});
            if (actions.agents != asked->decisions->agents)
                throw Error("unknown_agent", "actions of other agents", "those of the step in its order",
                            "answer each decision with one row of actions");
            check_actions(actions, spec, id);
            all.emplace(id, std::move(actions));
        }
        for (const Report& one : reports) {
            if (!one.decisions || one.decisions->agents.empty()) continue;
            if (theirs != sequence || all.count(one.behavior) == 0)
                throw Error("shape", "no actions for " + one.behavior, "one row for each decision", "answer each decision");
            std::vector<std::int64_t>& waiting = open_[one.behavior];
            waiting.insert(waiting.end(), one.decisions->agents.begin(), one.decisions->agents.end());
        }
        return all;
    }

    // A game may use a choice as an index.
    void check_actions(const Actions& actions, const BehaviorSpec& spec, const std::string& id) const {
        for (std::size_t i = 0; i < actions.discrete.size(); ++i)
            if (actions.discrete[i] < 0 || actions.discrete[i] >= spec.discrete[i % spec.discrete.size()])
                throw Error("shape", "choice " + std::to_string(actions.discrete[i]) + " for " + id, "one of the branch's",
                            "choose from the spec");
        const auto all = game_.scripts();
        const auto own = all.find(name_of(id));
        const std::size_t offered = own == all.end() ? 0 : own->second.size();
        for (std::int32_t one : actions.scripts)
            if (one < 0 || static_cast<std::size_t>(one) > offered)
                throw Error("scripts", "script " + std::to_string(one) + " for " + id, "one that hello names",
                            "ask for a script that the simulator offers");
    }
};

}  // namespace detail

// Plays a game for the trainer until either side says Bye, and reconnects when the connection breaks.
//
// Throws: Error where the trainer refuses the game, either side breaks the protocol, or an option is wrong; LinkLost
// where no trainer answers in time; what the game throws.
inline Result run(Game& game, Options options = {}) {
    const detail::Signals signals(options.handle_signals);
    return detail::Client(game, std::move(options)).play();
}

}  // namespace sparring
