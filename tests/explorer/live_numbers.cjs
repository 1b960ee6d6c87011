// The numbers of live figures: reads [[figure, change of its state], ...] and writes the numbers of each.
const live = require(process.argv[2]);

const answer = ([figure, change]) => {
  const state = Object.assign(live.start(figure), change);
  if (change && !change.mask && figure.size) state.mask = live.mask(figure, state);
  return live.numbers(figure, state);
};
const answers = JSON.parse(require("fs").readFileSync(0)).map(answer);
process.stdout.write(JSON.stringify(answers, (_, x) => (x === Infinity ? "inf" : x)));
