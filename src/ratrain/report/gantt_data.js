// The Gantt chart's data: one step per rank and stream, as gantt.py describes it, decoded and cross-linked.
// gantt_draw.js and gantt_pointer.js follow in the same module.
const data = JSON.parse(document.getElementById("gantt-data").textContent);
const naming = (shape, m) => (shape < 0 ? null : data.shapes[shape].replace(",m#", ",m" + m));
const kindOf = (name) => name.slice(0, name.indexOf("("));

const decode = (flat) => {
  const rows = [];
  for (let i = 0, clock = 0; i < flat.length; i += data.fields) {
    const [gap, duration, shape, m, waitedShape, waitedM, step] = flat.slice(i, i + data.fields);
    const name = naming(shape, m),
      start = clock + gap;
    const row = {
      name,
      kind: kindOf(name),
      m,
      start,
      end: start + duration,
      step,
      waited: naming(waitedShape, waitedM),
      waitFrom: clock,
    };
    if (row.waited && gap > 0) row.waitKind = kindOf(row.waited);
    row.idle = !row.waited && gap > 0 && i > 0;
    rows.push(row);
    clock = Math.max(clock, row.end);
  }
  return rows;
};
for (const set of data.sets)
  for (const rank of set.ranks) {
    rank.set = set;
    rank.lanes = data.streams
      .filter((s) => rank.streams[s])
      .map((stream) => ({ stream, rank, rows: decode(rank.streams[stream]) }));
    rank.byName = new Map();
    for (const lane of rank.lanes)
      for (const row of lane.rows) {
        row.lane = lane;
        rank.byName.set(row.step + row.name, row);
      }
  }

// The row of an action on a rank; undefined where it is not shown.
const find = (rank, name, step) => rank.byName.get(step + name);
const onStage = (name, stage, kind = kindOf(name)) => name.replace(/^\w+\(s\d+/, `${kind}(s${stage}`);

// The same action in the other set: forecast for measured, measured for forecast.
const twin = (row) => {
  const { stage, replica, set } = row.lane.rank;
  const others = data.sets.filter((s) => s !== set).flatMap((s) => s.ranks.filter((r) => r.stage === stage));
  const rank = others.find((r) => r.replica === replica) || others[0];
  return rank && find(rank, row.name, row.step);
};

// Who meets in a collective, as a test on another rank.
const meets = {
  GRAD_NORM: () => true,
  TIED_SYNC: (a, b) => a.replica === b.replica,
  GRAD_SYNC: (a, b) => a.stage === b.stage,
  PREFETCH_VIEW: (a, b) => a.stage === b.stage,
};

// The rank that joined a collective last: everybody waited for it.
const latecomer = (row) => {
  const { rank } = row.lane;
  if (!meets[row.kind]) return null;
  const members = rank.set.ranks
    .filter((r) => meets[row.kind](rank, r))
    .map((r) => find(r, onStage(row.name, r.stage), row.step))
    .filter(Boolean);
  const last = members.reduce((a, b) => (b.start > a.start ? b : a), row);
  return last === row ? null : last;
};

const sources = { RECV_ACT: ["SEND_ACT", -1], RECV_GRAD: ["SEND_GRAD", 1] };

// The transfer's other half, on the neighbouring stage.
const sender = (row) => {
  const { rank } = row.lane;
  const [kind, shift] = sources[row.kind] || [];
  const stage = rank.stage + shift;
  const peer = kind && rank.set.ranks.find((r) => r.stage === stage && r.replica === rank.replica);
  return peer && find(peer, onStage(row.name, stage, kind), row.step);
};

// The block whose output a send carries: the last of its micro-batch that had finished.
const producer = (sent) => {
  const kind = sent.kind === "SEND_ACT" ? "FORWARD" : "BACKWARD";
  const compute = sent.lane.rank.lanes.find((lane) => lane.stream === "compute");
  return compute.rows.findLast(
    (r) => r.kind === kind && r.step === sent.step && r.m === sent.m && r.end <= sent.start + 2,
  );
};

// From a row back to what held it up: what it waited for, and what that waited for on another rank.
const causes = (row) => {
  const { rank } = row.lane;
  const awaited = row.waitKind
    ? find(rank, row.waited, row.step) || find(rank, row.waited, row.step - 1)
    : row;
  if (!awaited) return [];
  const sent = sender(awaited);
  const chain = [awaited, latecomer(awaited), sent, sent && producer(sent)];
  return chain.filter((link) => link && link !== row);
};
