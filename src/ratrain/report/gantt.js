// Draws the Gantt chart of one step per rank and stream. The data is described in gantt.py.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("gantt-data").textContent);
  const host = document.getElementById("gantt");
  const canvas = host.querySelector("canvas"),
    tip = host.querySelector(".tip");
  const pen = canvas.getContext("2d");
  const LEFT = 158,
    RIGHT = 148,
    TOP = 24,
    MONO = "ui-monospace, 'DejaVu Sans Mono', monospace",
    SANS = "system-ui, 'DejaVu Sans', sans-serif";
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

  // ---- data
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
  const partner = { RECV_ACT: ["SEND_ACT", -1], RECV_GRAD: ["SEND_GRAD", 1] };
  const find = (rank, name, step) => rank.byName.get(step + name);
  const sender = (rank, name, step) => {
    const [kind, shift] = partner[kindOf(name)] || [];
    if (!kind) return null;
    const peer = rank.set.ranks.find((r) => r.stage === rank.stage + shift && r.replica === rank.replica);
    return peer && find(peer, name.replace(/^\w+\(s\d+/, `${kind}(s${rank.stage + shift}`), step);
  };
  const twin = (row) => {
    const { stage, replica, set } = row.lane.rank;
    const other = data.sets.find((s) => s !== set);
    const rank =
      other &&
      (other.ranks.find((r) => r.stage === stage && r.replica === replica) ||
        other.ranks.find((r) => r.stage === stage));
    return rank && find(rank, row.name, row.step);
  };

  // ---- layout
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
    width = host.clientWidth;
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

  // ---- drawing
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
      pair = state.source === "both";
    if (lead) {
      pen.font = "600 12.5px " + SANS;
      pen.fillStyle = colour.ink;
      pen.fillText("stage " + rank.stage, 0, mid);
      pen.font = "11px " + SANS;
      pen.fillStyle = colour.soft;
      if (alone)
        pen.fillText(`rank ${rank.rank}` + (replicated ? ` · r${rank.replica}` : ""), pair ? 56 : 70, mid);
    } else if (pair) {
      pen.font = "11px " + SANS;
      pen.fillStyle = colour.soft;
      pen.fillText(`rank ${rank.rank}` + (replicated ? ` · r${rank.replica}` : ""), 0, mid);
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
  const mark = ({ row, wait }) => {
    const lane = row.lane;
    const box = (r, from = r.start, to = r.end) => {
      if (r.lane.y === undefined || !lanes.includes(r.lane)) return;
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x(from), r.lane.y, Math.max(x(to) - x(from), 2), r.lane.h);
    };
    const link = (r, from, s, to) => {
      if (!lanes.includes(r.lane) || !lanes.includes(s.lane)) return;
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1.6;
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(x(from), r.lane.y + r.lane.h / 2);
      pen.lineTo(x(to), s.lane.y + s.lane.h / 2);
      pen.stroke();
      pen.setLineDash([]);
    };
    wait ? box(row, row.waitFrom, row.start) : box(row);
    const cause =
      (row.waited && find(lane.rank, row.waited, row.step)) ||
      (row.waited && find(lane.rank, row.waited, row.step - 1));
    let end = wait || row.waitKind ? cause : row;
    if (end) {
      if (end !== row) {
        box(end);
        link(end, end.end, row, row.start);
      }
      const sent = sender(lane.rank, end.name, end.step);
      if (sent) {
        const made = find(sent.lane.rank, sent.name, sent.step);
        box(made);
        link(
          made,
          made.start,
          end === row || !lanes.includes(end.lane) ? row : end,
          end === row ? row.end : lanes.includes(end.lane) ? end.end : row.start,
        );
        const work = [...sent.lane.rank.lanes[0].rows]
          .reverse()
          .find(
            (r) =>
              r.step === sent.step &&
              r.m === sent.m &&
              r.end <= sent.start + 2 &&
              (r.kind === "FORWARD" || r.kind === "BACKWARD"),
          );
        if (work) {
          box(work);
          if (!lanes.includes(sent.lane)) link(work, work.end, row, row.start);
        }
      }
    }
    const other = !wait && twin(row);
    if (other) box(other);
  };

  // ---- pointing
  const at = (px, py) => {
    if (px < LEFT || px > LEFT + span()) return null;
    const lane = lanes.find((l) => py >= l.y - 1 && py <= l.y + l.h + 1);
    if (!lane) return null;
    const time = t(px),
      slack = (1.5 / span()) * (state.to - state.from);
    let best = null;
    for (const row of lane.rows) {
      if (
        row.start - slack <= time &&
        time <= row.end + slack &&
        (!best || row.end - row.start <= best.row.end - best.row.start || time > best.row.end)
      )
        best = { row, wait: false };
      else if (
        !best &&
        lane.stream === "compute" &&
        (row.waitKind || row.idle) &&
        row.waitFrom <= time &&
        time < row.start
      )
        best = { row, wait: true };
    }
    return best;
  };
  const escape = (s) => s.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const describe = ({ row, wait }) => {
    const rank = row.lane.rank,
      lines = [];
    const place =
      `rank ${rank.rank} · stage ${rank.stage} · replica ${rank.replica} · ${row.lane.stream}` +
      (row.step ? ` · ${row.step > 0 ? "next" : "previous"} step` : "") +
      (data.sets.length > 1 ? ` · ${rank.set.name}` : "");
    if (wait) {
      lines.push(`<b class="mono">${row.waited ? "wait " + escape(row.waited) : "idle"}</b>`);
      lines.push(
        `<b>${duration(row.start - row.waitFrom)}</b> from ${duration(row.waitFrom)}, before <span class="mono">${escape(row.name)}</span>`,
      );
    } else {
      lines.push(`<b class="mono">${escape(row.name)}</b>`);
      lines.push(`start ${duration(row.start)} · duration <b>${duration(row.end - row.start)}</b>`);
      if (row.waitKind)
        lines.push(
          `waited ${duration(row.start - row.waitFrom)} for <span class="mono">${escape(row.waited)}</span>`,
        );
      const other = twin(row);
      if (other)
        lines.push(
          `${other.lane.rank.set.name}: start ${duration(other.start)} · duration ${duration(other.end - other.start)}`,
        );
    }
    lines.push(`<span class="soft">${place}</span>`);
    return lines.join("<br>");
  };
  const move = (event) => {
    const box = canvas.getBoundingClientRect(),
      px = event.clientX - box.left,
      py = event.clientY - box.top;
    if (state.drag) {
      state.drag.x1 = Math.max(LEFT, Math.min(px, LEFT + span()));
      state.hover = null;
      tip.hidden = true;
      draw();
      return;
    }
    state.hover = at(px, py);
    tip.hidden = !state.hover;
    if (state.hover) {
      tip.innerHTML = describe(state.hover);
      tip.style.left = Math.min(px + 14, width - tip.offsetWidth - 4) + "px";
      tip.style.top =
        (py + 20 + tip.offsetHeight > height + 60 ? py - tip.offsetHeight - 12 : py + 20) + "px";
    }
    draw();
  };
  const zoom = (from, to) => {
    const size = Math.max(Math.min(to - from, full), full / 5000);
    state.from = Math.max(0, Math.min(from, full - size));
    state.to = state.from + size;
    draw();
  };
  const scale = (factor, centre = (state.from + state.to) / 2) =>
    zoom(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);
  const pan = (share) => {
    const d = (state.to - state.from) * share;
    zoom(state.from + d, state.to + d);
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerleave", () => {
    state.hover = null;
    tip.hidden = true;
    draw();
  });
  canvas.addEventListener("pointerdown", (e) => {
    const px = e.clientX - canvas.getBoundingClientRect().left;
    if (px >= LEFT && px <= LEFT + span()) {
      canvas.setPointerCapture(e.pointerId);
      state.drag = { x0: px, x1: px };
    }
  });
  canvas.addEventListener("pointerup", () => {
    const d = state.drag;
    state.drag = null;
    if (d && Math.abs(d.x1 - d.x0) > 6) zoom(t(Math.min(d.x0, d.x1)), t(Math.max(d.x0, d.x1)));
    else draw();
  });
  canvas.addEventListener("dblclick", () => zoom(0, full));
  canvas.addEventListener(
    "wheel",
    (e) => {
      if (!e.ctrlKey && !e.shiftKey && Math.abs(e.deltaX) <= Math.abs(e.deltaY)) return;
      e.preventDefault();
      if (e.ctrlKey) scale(Math.exp(e.deltaY * 0.004), t(e.clientX - canvas.getBoundingClientRect().left));
      else pan((e.deltaX || e.deltaY) / span());
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (e) => {
    const act = {
      ArrowLeft: () => pan(-0.2),
      ArrowRight: () => pan(0.2),
      "+": () => scale(0.6),
      "=": () => scale(0.6),
      "-": () => scale(1 / 0.6),
      0: () => zoom(0, full),
    }[e.key];
    if (act) {
      e.preventDefault();
      act();
    }
  });
  const choose = (key) => {
    for (const button of host.querySelectorAll(`[data-${key}]`)) {
      button.setAttribute("aria-pressed", String(button.dataset[key] === state[key]));
      button.addEventListener("click", () => {
        state[key] = button.dataset[key];
        for (const b of host.querySelectorAll(`[data-${key}]`))
          b.setAttribute("aria-pressed", String(b === button));
        layout();
        draw();
      });
    }
  };
  choose("source");
  choose("streams");
  for (const button of host.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () =>
      ({ in: () => scale(0.5), out: () => scale(2), all: () => zoom(0, full) })[button.dataset.zoom](),
    );
  const refresh = () => {
    theme();
    layout();
    draw();
  };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  new ResizeObserver(() => {
    layout();
    draw();
  }).observe(host);
  refresh();
})();
