// Agents walk to the end of a corridor: the game of corridor.mjs (Node) and corridor.html (a browser).

export const LENGTH = 8;
const BEHAVIOR = "Corridor?team=0";
const LONGEST_EPISODE = 50;

/** Each agent observes its place and whether it stands at the wall. It may wait, or walk left or right. */
export class Corridor {
  name = "corridor";

  /**
   * @param {number} agents how many there are
   * @param {(places: number[]) => void | Promise<void>} [show] is called after each step, and may make the game wait
   */
  constructor(agents, show = () => {}) {
    this.places = new Array(agents).fill(0);
    this.steps = new Array(agents).fill(0);
    this.show = show;
    this.random = generator(1);
  }

  behaviors() {
    const observations = [
      { name: "place", shape: [1] },
      { name: "wall", shape: [1] },
    ];
    return { [BEHAVIOR]: { observations, actions: { discrete: [3] } } };
  }

  reset(_parameters, seed) {
    if (seed !== null) this.random = generator(seed);
    this.places.forEach((_, agent) => this.begin(agent));
    return [{ behavior: BEHAVIOR, decisions: this.decisions() }];
  }

  async step(actions) {
    const { discrete } = actions[BEHAVIOR];
    const ended = [];
    this.places.forEach((_, agent) => {
      this.places[agent] += [0, -1, 1][discrete[agent]];
      this.steps[agent] += 1;
      if (this.places[agent] === LENGTH - 1 || this.steps[agent] === LONGEST_EPISODE) ended.push(agent);
    });
    await this.show(this.places);
    const atEnd = ended.map((agent) => this.places[agent] === LENGTH - 1);
    const ends = {
      agents: ended,
      observations: this.observe(ended),
      rewards: atEnd.map((done) => (done ? 1 : -0.01)),
      interrupted: atEnd.map((done) => !done),
    };
    for (const agent of ended) this.begin(agent); // the same report holds the first decision of the next episode
    return [{ behavior: BEHAVIOR, decisions: this.decisions(), ends: ended.length > 0 ? ends : null }];
  }

  begin(agent) {
    this.places[agent] = Math.floor(this.random() * (LENGTH - 1));
    this.steps[agent] = 0;
  }

  observe(agents) {
    const places = agents.map((agent) => this.places[agent]);
    return [places.map((place) => place / LENGTH), places.map((place) => Number(place === 0))];
  }

  decisions() {
    const agents = [...this.places.keys()];
    return {
      agents,
      observations: this.observe(agents),
      rewards: agents.map(() => -0.01), // of the step before; ignored for an agent's first decision
      masks: this.places.flatMap((place) => [false, place === 0, false]), // true = forbidden
    };
  }
}

/** Returns a source of random numbers in [0, 1) that repeats itself for the same seed: a linear congruence. */
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
