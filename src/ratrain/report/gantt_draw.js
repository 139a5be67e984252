// Drawing the chart: state, layout, colours, lanes.
const host = document.getElementById("gantt");
const canvas = host.querySelector("canvas");
const pen = canvas.getContext("2d");
const SANS = "system-ui, 'DejaVu Sans', sans-serif";
const [LEFT, RIGHT, TOP] = [158, 148, 24]; // margins: names, exposed share, axis
const full = Math.max(...data.sets.map((s) => s.window));
const replicated = data.sets.some((s) => s.ranks.some((r) => r.replica > 0));
const many = Math.max(...data.sets.map((s) => s.ranks.length));
const state = {
  from: 0,
  to: full,
  source: data.sets.length > 1 ? "both" : data.sets[0].name,
  streams: data.sets.length > 1 || many > 20 ? "compute" : "all",
  hover: null,
  drag: null,
};

let lanes = [],
  heads = [],
  height = 0,
  width = 0;
const layout = () => {
  const both = state.source === "both";
  const shown = both ? data.sets : data.sets.filter((s) => s.name === state.source);
  const lead = shown.reduce((a, b) => (b.ranks.length > a.ranks.length ? b : a));
  const tall = many <= 8 ? 30 : many <= 20 ? 22 : 14,
    thin = many <= 8 ? 9 : 5;
  lanes = [];
  heads = [];
  let y = TOP + 4;
  for (const rank of lead.ranks) {
    const members = both
      ? data.sets
          .map((s) => s.ranks.find((r) => r.stage === rank.stage && r.replica === rank.replica))
          .filter(Boolean)
      : [rank];
    for (const member of members) {
      for (const lane of member.lanes) {
        if (state.streams === "compute" && lane.stream !== "compute") continue;
        const h = lane.stream === "compute" ? (both ? tall * 0.8 : tall) : thin;
        lanes.push(Object.assign(lane, { y, h }));
        y += h + (lane.stream === "compute" ? 2 : 1);
      }
      heads.push({ rank: member, lead: member === members[0], alone: members.length === 1 });
    }
    y += both ? 7 : state.streams === "all" ? 8 : 3;
  }
  height = y + 4;
  width = canvas.parentElement.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
};
const span = () => width - LEFT - RIGHT;
const x = (t) => LEFT + ((t - state.from) / (state.to - state.from)) * span();
const t = (px) => state.from + ((px - LEFT) / span()) * (state.to - state.from);

// ---- colours
let colour = {},
  hatch = {};
const theme = () => {
  const css = getComputedStyle(document.documentElement);
  colour = {};
  hatch = {};
  for (const name of [
    ...data.kinds,
    "idle",
    "ink",
    "soft",
    "line",
    "lane",
    "card",
    "accent",
    "on-dark",
    "on-light",
  ])
    colour[name] = css.getPropertyValue("--" + name).trim();
  for (const kind of [...data.kinds, "idle"]) {
    const tile = document.createElement("canvas"),
      ratio = window.devicePixelRatio || 1,
      size = Math.round(6 * ratio);
    tile.width = tile.height = size;
    const p = tile.getContext("2d");
    p.fillStyle = colour[kind];
    p.globalAlpha = 0.16;
    p.fillRect(0, 0, size, size);
    p.globalAlpha = 0.85;
    p.strokeStyle = colour[kind];
    p.lineWidth = 1.2 * ratio;
    for (const d of [-size, 0, size]) {
      p.beginPath();
      p.moveTo(d - 1, size + 1);
      p.lineTo(d + size + 1, -1);
      p.stroke();
    }
    hatch[kind] = pen.createPattern(tile, "repeat");
    hatch[kind].setTransform(new DOMMatrix().scale(1 / ratio));
  }
};
const light = (kind) => ["SEND_ACT", "RECV_ACT", "FORWARD", "PREFETCH_VIEW"].includes(kind);
const duration = (ticks) => {
  const s = ticks * data.tick,
    a = Math.abs(s);
  return a >= 1
    ? s.toPrecision(4) + " s"
    : a >= 1e-3
      ? (s * 1e3).toPrecision(4) + " ms"
      : (s * 1e6).toPrecision(3) + " µs";
};

const draw = () => {
  pen.clearRect(0, 0, width, height);
  axis();
  for (const head of heads) title(head);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, span(), height);
  pen.clip();
  for (const lane of lanes) drawLane(lane);
  boundaries();
  if (state.hover) mark(state.hover);
  if (state.drag) {
    pen.fillStyle = colour.accent;
    pen.globalAlpha = 0.18;
    pen.fillRect(
      Math.min(state.drag.x0, state.drag.x1),
      TOP,
      Math.abs(state.drag.x1 - state.drag.x0),
      height,
    );
    pen.globalAlpha = 1;
  }
  pen.restore();
};
const axis = () => {
  const seconds = (state.to - state.from) * data.tick,
    raw = seconds / Math.max(4, span() / 110);
  const power = 10 ** Math.floor(Math.log10(raw)),
    nice = [1, 2, 5, 10].find((n) => n * power >= raw) * power;
  const unit = seconds >= 2 ? [1, "s"] : seconds >= 2e-3 ? [1e3, "ms"] : [1e6, "µs"];
  pen.font = "11px " + SANS;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (
    let i = Math.ceil((state.from * data.tick) / nice - 1e-6);
    i * nice <= state.to * data.tick * (1 + 1e-9);
    i++
  ) {
    const px = x((i * nice) / data.tick);
    pen.fillStyle = colour.line;
    pen.fillRect(Math.round(px), TOP - 6, 1, height - TOP);
    if (px > LEFT + span() - 24) continue;
    pen.fillStyle = colour.soft;
    pen.fillText(+(i * nice * unit[0]).toPrecision(6) + " " + unit[1], px, 10);
  }
  pen.fillStyle = colour.soft;
  pen.textAlign = "left";
  pen.fillText("exposed, mostly", width - RIGHT + 12, 10);
};
const title = ({ rank, lead, alone }) => {
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const lane = lanes.find((l) => l.rank === rank),
    mid = lane.y + lane.h / 2,
    pair = state.source === "both",
    name = `rank ${rank.rank}` + (replicated ? ` · r${rank.replica}` : "");
  if (lead) {
    pen.font = "600 12.5px " + SANS;
    pen.fillStyle = colour.ink;
    pen.fillText(`stage ${rank.stage}` + (pair && alone && replicated ? ` · r${rank.replica}` : ""), 0, mid);
    pen.font = "11px " + SANS;
    pen.fillStyle = colour.soft;
    if (alone && !pair) pen.fillText(name, 70, mid);
  } else if (pair) {
    pen.font = "11px " + SANS;
    pen.fillStyle = colour.soft;
    pen.fillText(name, 0, mid);
  }
  if (pair) {
    pen.font = "11px " + SANS;
    pen.fillStyle = colour.soft;
    pen.textAlign = "right";
    pen.fillText(rank.set.name, LEFT - 8, mid);
    pen.textAlign = "left";
  }
  if (state.streams === "all") {
    pen.font = "9px " + SANS;
    pen.textAlign = "right";
    pen.fillStyle = colour.soft;
    for (const l of lanes)
      if (l.rank === rank && l.h >= 8 && l.stream !== "compute")
        pen.fillText(l.stream, LEFT - 8, l.y + l.h / 2);
    pen.textAlign = "left";
  }
  const share = rank.exposed / rank.step;
  pen.font = "600 12px " + SANS;
  pen.fillStyle = colour.ink;
  pen.fillText(Math.round(share * 100) + " %", width - RIGHT + 12, mid);
  if (rank.cause) {
    pen.fillStyle = hatch[rank.cause] || hatch.idle;
    pen.fillRect(width - RIGHT + 52, mid - 5, 9, 10);
    pen.font = "10px " + SANS;
    pen.fillStyle = colour.soft;
    pen.fillText(rank.cause, width - RIGHT + 65, mid);
  }
};
const drawLane = (lane) => {
  const { y, h, rows } = lane,
    compute = lane.stream === "compute";
  pen.fillStyle = colour.lane;
  pen.fillRect(LEFT, y, span(), h);
  let group = null;
  const flush = () => {
    if (group) number(group, y, h);
    group = null;
  };
  for (const row of rows) {
    if (row.end < state.from) continue;
    if ((compute ? row.waitFrom : row.start) > state.to) break;
    const a = x(row.start),
      b = x(row.end);
    if (compute && row.start > row.waitFrom && (row.waitKind || row.idle)) {
      const from = x(Math.max(row.waitFrom, 0)),
        w = a - from;
      if (w > 0.4) {
        pen.globalAlpha = row.step ? 0.45 : 1;
        pen.fillStyle = row.waitKind ? hatch[row.waitKind] : hatch.idle;
        if (row.waitKind || w > 2) pen.fillRect(from, y, w, h);
        pen.globalAlpha = 1;
        if (row.waitKind && h >= 14) waitText(row, Math.max(from, LEFT), Math.min(a, LEFT + span()), y, h);
      }
    }
    const pale = row.step ? 0.38 : 1,
      posted = row.kind.startsWith("RECV"); // a receive: posted, then arrived
    pen.globalAlpha = posted ? pale * 0.3 : pale;
    pen.fillStyle = colour[row.kind];
    pen.fillRect(a, y, Math.max(b - a, 0.7), h);
    pen.globalAlpha = pale;
    if (posted) pen.fillRect(b - 2.5, y, 2.5, h);
    pen.globalAlpha = 1;
    if (!compute && b - a > 4) {
      pen.fillStyle = colour.card;
      pen.fillRect(a, y, 0.8, h);
    }
    if (!compute) continue;
    const same =
      group && group.kind === row.kind && group.m === row.m && group.step === row.step && a - group.b < 1.5;
    if (!same) {
      flush();
      group = { kind: row.kind, m: row.m, step: row.step, a, b };
    } else {
      if (b - a > 6) {
        pen.fillStyle = colour.card;
        pen.globalAlpha = 0.3;
        pen.fillRect(a, y, 1, h);
        pen.globalAlpha = 1;
      }
      group.b = b;
    }
  }
  flush();
};
const number = (g, y, h) => {
  if (g.b - g.a > 5) {
    pen.fillStyle = colour.card;
    pen.fillRect(g.a, y, 1, h);
  }
  if (h < 11 || g.m < 0) return;
  const a = Math.max(g.a, LEFT),
    b = Math.min(g.b, LEFT + span());
  pen.font = `600 ${h >= 20 ? 11.5 : 10}px ${SANS}`;
  const text = String(g.m);
  if (b - a < pen.measureText(text).width + 2) return;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = light(g.kind) ? colour["on-light"] : colour["on-dark"];
  pen.globalAlpha = g.step ? 0.5 : 1;
  pen.fillText(text, (a + b) / 2, y + h / 2 + 0.5);
  pen.globalAlpha = 1;
};
const waitText = (row, a, b, y, h) => {
  const m = /,m(\d+)/.exec(row.waited);
  const long = `wait ${row.waitKind}${m ? " m" + m[1] : ""}`,
    short = row.waitKind;
  pen.font = "600 10px " + SANS;
  const text = [long, short].find((s) => pen.measureText(s).width + 12 < b - a);
  if (!text) return;
  const w = pen.measureText(text).width,
    mid = (a + b) / 2;
  pen.globalAlpha = row.step ? 0.6 : 1;
  pen.fillStyle = colour.card;
  pen.fillRect(mid - w / 2 - 3, y + h / 2 - 6.5, w + 6, 13);
  pen.fillStyle = colour.ink;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, mid, y + h / 2 + 0.5);
  pen.globalAlpha = 1;
};
// The step's end on each rank: its first FORWARD of the next step.
const boundaries = () => {
  for (const lane of lanes) {
    if (lane.stream !== "compute") continue;
    for (const edge of [0, 1]) {
      const first = lane.rows.find((r) => r.kind === "FORWARD" && r.step === edge);
      const at = first ? first.start : edge ? lane.rank.set.window : null;
      if (at === null || at < state.from || at > state.to) continue;
      pen.fillStyle = colour.ink;
      pen.fillRect(Math.min(x(at), LEFT + span() - 2) - 1, lane.y - 1, 2, lane.h + 2);
    }
  }
};

// Outlines what is pointed at and what held it up, and joins them.
const mark = ({ row, wait }) => {
  pen.strokeStyle = colour.ink;
  const box = (r, from = r.start, to = r.end) => {
    pen.lineWidth = 2;
    pen.strokeRect(x(from), r.lane.y, Math.max(x(to) - x(from), 2), r.lane.h);
  };
  const middle = (r) => r.lane.y + r.lane.h / 2;
  if (wait) box(row, row.waitFrom, row.start);
  else box(row);
  let effect = row;
  for (const cause of causes(row).filter((r) => lanes.includes(r.lane))) {
    box(cause);
    pen.lineWidth = 1.6;
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(x(meets[cause.kind] && meets[effect.kind] ? cause.start : cause.end), middle(cause));
    pen.lineTo(
      x(effect.kind.startsWith("RECV") || meets[effect.kind] ? effect.end : effect.start),
      middle(effect),
    );
    pen.stroke();
    pen.setLineDash([]);
    effect = cause;
  }
  const other = !wait && twin(row);
  if (other && lanes.includes(other.lane)) box(other);
};
