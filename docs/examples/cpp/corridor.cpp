// A simulator in C++: agents walk to the end of a corridor.
//
//     c++ -std=c++17 -O2 -Wall -Wextra -pthread corridor.cpp -o corridor
//     sparring compliance -- ./corridor      # checks it against the protocol
//     sparring train corridor.yaml           # starts it and trains
#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

#include "sparring.hpp"

namespace {

const char* const behavior = "Corridor?team=0";
constexpr int length = 8, longest_episode = 50;

// Each agent observes its place and whether it stands at the wall. It may wait, or walk left or right.
class Corridor : public sparring::Game {
public:
    explicit Corridor(std::size_t agents) : places_(agents), steps_(agents) {}

    std::string name() const override { return "corridor"; }

    sparring::Behaviors behaviors() const override {
        sparring::BehaviorSpec spec;
        spec.observations = {{"place", {1}}, {"wall", {1}}};
        spec.discrete = {3};
        return {{behavior, spec}};
    }

    sparring::Reports reset(const sparring::Parameters&, std::optional<std::int64_t> seed) override {
        if (seed) random_.seed(static_cast<std::uint64_t>(*seed));
        for (std::size_t agent = 0; agent < places_.size(); ++agent) begin(agent);
        return {{behavior, decisions(), std::nullopt}};
    }

    sparring::Reports step(const sparring::ActionsById& actions, const sparring::Parameters&) override {
        const std::vector<std::int32_t>& chosen = actions.at(behavior).discrete;
        sparring::Ends ends;
        std::vector<float> places, walls;
        for (std::size_t agent = 0; agent < places_.size(); ++agent) {
            places_[agent] += chosen[agent] == 2 ? 1 : chosen[agent] == 1 ? -1 : 0;
            const bool at_end = places_[agent] == length - 1;
            if (!at_end && ++steps_[agent] < longest_episode) continue;
            ends.agents.push_back(static_cast<std::int64_t>(agent));
            ends.rewards.push_back(at_end ? 1.0f : -0.01f);
            ends.interrupted.push_back(at_end ? 0 : 1);
            observe(agent, places, walls);
            begin(agent);  // the same report holds the first decision of the next episode
        }
        ends.observations = {places, walls};
        sparring::Report report{behavior, decisions(), std::nullopt};
        if (!ends.agents.empty()) report.ends = ends;
        return {report};
    }

private:
    std::vector<int> places_, steps_;
    std::mt19937_64 random_{1};

    void begin(std::size_t agent) {
        places_[agent] = static_cast<int>(random_() % (length - 1));
        steps_[agent] = 0;
    }

    void observe(std::size_t agent, std::vector<float>& places, std::vector<float>& walls) const {
        places.push_back(static_cast<float>(places_[agent]) / length);
        walls.push_back(places_[agent] == 0 ? 1.0f : 0.0f);
    }

    sparring::Decisions decisions() const {
        sparring::Decisions all;
        std::vector<float> places, walls;
        for (std::size_t agent = 0; agent < places_.size(); ++agent) {
            all.agents.push_back(static_cast<std::int64_t>(agent));
            observe(agent, places, walls);
            const std::uint8_t at_wall = places_[agent] == 0 ? 1 : 0;
            all.masks.insert(all.masks.end(), {0, at_wall, 0});  // 1 = forbidden
        }
        all.rewards.assign(places_.size(), -0.01f);  // of the step before; ignored for an agent's first decision
        all.observations = {places, walls};
        return all;
    }
};

}  // namespace

int main(int count, char** words) {
    sparring::Options options;
    if (count > 1) options.address = words[1];  // else $SPARRING_ADDRESS
    Corridor corridor(8);
    try {
        const sparring::Result result = sparring::run(corridor, options);
        const auto steps = result.steps.find("Corridor");
        std::cout << "ended after " << (steps == result.steps.end() ? 0 : steps->second) << " steps: " << result.reason << "\n";
        return 0;
    } catch (const sparring::Error& error) {
        std::cerr << error.what() << "\n";
        return error.status();
    }
}
