// Types of sparring.js. Numbers of columns are row by row; what they mean is in docs/protocol.md.

/** Any array of numbers; one of the type that is sent is not converted. */
export type Numbers = ArrayLike<number>;
export type Ids = ArrayLike<number> | BigInt64Array;
export type Flags = ArrayLike<number> | ArrayLike<boolean>;

export interface ObservationSpec {
  /** Unique in the behavior. */
  name: string;
  /** Per agent, without the number of agents. */
  shape: number[];
  /** Default "float32"; uint8 for images. */
  dtype?: "float32" | "uint8";
  /** Default "vector". */
  kind?: "vector" | "image" | "entities" | "goal";
}

export interface BehaviorSpec {
  observations: ObservationSpec[];
  actions: {
    /** Number of continuous actions, each in [-1, 1]. */
    continuous?: number;
    /** Number of choices of each branch. */
    discrete?: number[];
  };
}

interface Rows {
  /** [n] ids, unique within the behavior id. */
  agents: Ids;
  /** One for each observation of the spec: [n, ...shape]. */
  observations: Numbers[];
  /** [n] since the agent's previous decision; default 0. */
  rewards?: Numbers;
  /** [n] of the agent's group. */
  groupRewards?: Numbers;
  /** [n] */
  matches?: Ids;
  /** [n, continuous] what the agent did, where the simulator decided. */
  didContinuous?: Numbers;
  /** [n, branches] */
  didDiscrete?: Numbers;
}

/** The agents that need an action now. */
export interface Decisions extends Rows {
  /** [n] 0 for none. */
  groups?: Ids;
  /** [n, choices of all branches] true = forbidden. */
  masks?: Flags;
}

/** The agents whose episode has just ended; they may be in the decisions too, with the first of their next episode. */
export interface Ends extends Rows {
  /** [n] true where a limit ended the episode, false where the task did; default false. */
  interrupted?: Flags;
  /** [n] 1 won, 0.5 drawn, 0 lost. */
  outcomes?: Numbers;
}

export interface Report {
  /** Behavior id, as "Ball?team=0". */
  behavior: string;
  decisions?: Decisions | null;
  ends?: Ends | null;
}

/** The actions for the decisions of one behavior id, row by row in their order. */
export interface Actions {
  agents: number[];
  continuous: Float32Array;
  discrete: Int32Array;
  /** Which script plays instead, from 1; null where none does. */
  scripts: Int32Array | null;
}

export interface Statistic {
  name: string;
  value: number;
  /** Default "average". */
  aggregation?: "average" | "sum" | "histogram" | "most_recent";
}

/** Environment parameters, updated in place; of sampled ones the first sample. */
export type Parameters = Readonly<Record<string, number>>;

/** A simulator with any number of agents of one or more behaviors. */
export interface Game {
  /** The name of the program, for logs. */
  name: string;
  /** The spec of each behavior id; called again when a report has a new one. */
  behaviors(): Record<string, BehaviorSpec>;
  /** Starts new episodes for all agents and returns their first decisions. With null the random source goes on. */
  reset(parameters: Parameters, seed: number | null): Report[] | Promise<Report[]>;
  /** Plays on with the actions, by behavior id; returns at most one report for each. */
  step(actions: Record<string, Actions>, parameters: Parameters): Report[] | Promise<Report[]>;
  /** Statistics since the last call. */
  statistics?(): Statistic[];
  /** Names of scripts with which this game can play any agent itself, by behavior name. */
  scripts?(): Record<string, string[]>;
  /** Called once, at the end. */
  close?(): void | Promise<void>;
}

export interface Options {
  /** tcp://HOST:PORT or unix:///PATH (Node), ws:// or wss://; default $SPARRING_ADDRESS. */
  address?: string;
  /** Number among the supervisor's simulators; default $SPARRING_NUMBER. */
  number?: number | null;
  /** Where the trainer's first reset has none; default $SPARRING_SEED. */
  seed?: number | null;
  /** Token, where the endpoint asks for one; default $SPARRING_CREDENTIAL. */
  credential?: string;
  /** Seconds to connect, at the start and after a loss; default 60. */
  connectTimeoutS?: number;
  /** false: LinkLost when a connection breaks. */
  reconnect?: boolean;
  /** Node: options of `tls.connect`, as ca, cert and key, for a tcp:// address with keys. */
  tls?: Record<string, unknown>;
  /** Ends the conversation with a Bye. In Node SIGINT and SIGTERM do so too. */
  signal?: AbortSignal;
}

export interface Result {
  /** Steps reported since the start, by behavior name. */
  steps: Record<string, number>;
  /** Reason in the Bye of either side. */
  reason: string;
}

/** What was found, what was expected, and what to do; `code` is one of docs/protocol.md, or "settings", or "lost". */
export class SparringError extends Error {
  constructor(code: string, got: string, expected: string, remedy: string);
  code: string;
  got: string;
  expected: string;
  remedy: string;
}

/** The connection broke, or was silent for too long. */
export class LinkLost extends SparringError {
  constructor(got: string, expected?: string, remedy?: string);
}

/** Plays a game for the trainer until either side says Bye, and reconnects when the connection breaks. */
export function run(game: Game, options?: Options): Promise<Result>;
