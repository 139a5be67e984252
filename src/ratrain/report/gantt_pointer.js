// Pointing at the chart: tip, zoom, keys, buttons.
const tip = host.querySelector(".tip");

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
    for (const cause of causes(row).slice(1))
      lines.push(
        `held up by <span class="mono">${escape(cause.name)}</span> on rank ${cause.lane.rank.rank}`,
      );
  } else {
    lines.push(`<b class="mono">${escape(row.name)}</b>`);
    lines.push(`start ${duration(row.start)} · duration <b>${duration(row.end - row.start)}</b>`);
    if (row.waitKind)
      lines.push(
        `waited ${duration(row.start - row.waitFrom)} for <span class="mono">${escape(row.waited)}</span>`,
      );
    const last = latecomer(row);
    if (last)
      lines.push(`last to join: rank ${last.lane.rank.rank}, ${duration(last.start - row.start)} later`);
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
    tip.style.top = (py + 20 + tip.offsetHeight > height + 60 ? py - tip.offsetHeight - 12 : py + 20) + "px";
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
