// A simulator in Node.
//
//     sparring compliance -- node corridor.mjs    # checks it against the protocol
//     sparring train corridor.yaml                # starts it and trains
import { run, SparringError } from "./sparring.js";
import { Corridor } from "./corridor.js";

try {
  const { reason, steps } = await run(new Corridor(8), { address: process.argv[2] }); // by default $SPARRING_ADDRESS
  console.log(`ended after ${steps.Corridor ?? 0} steps: ${reason}`);
} catch (error) {
  console.error(error instanceof SparringError ? error.message : error);
  process.exitCode = error.code === "lost" ? 1 : 3; // 3: a restart would fail in the same way
}
