"use strict";
(() => {
  const data = JSON.parse(document.getElementById("events").textContent);
  const canvas = document.getElementById("timeline"), tip = document.getElementById("tip");
  const range = document.getElementById("range"), box = canvas.parentElement, pen = canvas.getContext("2d");
  const digits = String(Math.max(0, ...data.ranks.map((r) => r.rank))).length;
  const LEFT = 62 + 8 * Math.max(0, digits - 3), TOP = 24, LANE = 17, GAP = 10, ROW = 3 * LANE + GAP, KINDS = data.kinds;
  const MAX_HEIGHT = 8000;  // pixels of the canvas: some browsers draw nothing above 16,384 pixels, or above a limit of the area
  const LANE_OF = { compute: 0, copy: 0, wait: 1, collective: 1, post: 1, transfer: 2 };
  const COLOUR = { compute: "--compute", copy: "--copy", wait: "--wait", collective: "--comm", post: "--post", transfer: "--transfer" };
  const WORDS = { compute: "kernel", copy: "copies", wait: "waiting", collective: "collective", post: "starting transfers", transfer: "transfer" };
  const time = (x) => {
    const ns = x * data.unit, a = Math.abs(ns);
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
      if (a >= size) return +(ns / size).toPrecision(4) + " " + unit;
    return ns ? Math.round(ns) + " ns" : "0";
  };
  const scaled = (x, units, base) => {
    let i = 0;
    while (x >= base && i < 5) { x /= base; i++; }
    return (x >= 100 ? Math.round(x) : +x.toPrecision(3)) + " " + units[i];
  };
  const rate = (x, unit) => scaled(x, ["", "k", "M", "G", "T", "P"].map((prefix) => prefix + unit), 1000);
  const bytes = (x) => scaled(x, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
  let end = 1;
  const ranks = data.ranks.map((r) => {
    const n = r.e.length / 3, start = new Float64Array(n), stop = new Float64Array(n), what = new Int32Array(n);
    const lanes = [[], [], []];
    for (let i = 0, at = 0; i < n; i++) {
      at += r.e[3 * i];
      start[i] = at; stop[i] = at + r.e[3 * i + 1]; what[i] = r.e[3 * i + 2];
      end = Math.max(end, stop[i]);
      lanes[LANE_OF[KINDS[data.what[what[i]][0]]]].push(i);
    }
    // The latest end of any event up to this one, so that a bisection finds the events of a time.
    const reach = lanes.map((lane) => { let latest = 0; return lane.map((i) => (latest = Math.max(latest, stop[i]))); });
    const locations = [];
    for (let p = 0, at = 0; p < r.p.length; p += 4) locations.push([(at += r.p[p]), r.p[p + 1], r.p[p + 2], r.p[p + 3]]);
    return { rank: r.rank, start, stop, what, lanes, reach, locations };
  });
  // With many ranks, the canvas covers only the part of the timeline around the window, from `above` on.
  const full = TOP + ranks.length * ROW + 4;
  let from = 0, to = end, width = 0, height = 0, above = 0, printing = false, shown = null;
  const x = (t) => LEFT + ((t - from) / (to - from)) * (width - LEFT - 8);
  const back = (px) => from + ((px - LEFT) / (width - LEFT - 8)) * (to - from);
  const top = (r, lane) => TOP + r * ROW + lane * LANE;
  const first = (list, value) => {
    let low = 0, high = list.length;
    while (low < high) { const mid = (low + high) >> 1; if (list[mid] <= value) low = mid + 1; else high = mid; }
    return low;
  };
  function draw() {
    const css = getComputedStyle(document.documentElement), colour = (name) => css.getPropertyValue(name).trim();
    const ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth; height = Math.min(full, Math.floor(MAX_HEIGHT / ratio));
    if (!printing) above = Math.round(Math.max(0, Math.min(full - height, (innerHeight - height) / 2 - box.getBoundingClientRect().top)));
    box.style.height = printing ? "" : full + 2 + "px";  // with the canvas's border
    canvas.style.height = height + "px"; canvas.style.top = printing ? "" : above + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, -above * ratio);
    pen.fillStyle = colour("--paper"); pen.fillRect(0, above, width, height);
    pen.font = "11.5px system-ui, sans-serif"; pen.textBaseline = "middle";
    const raw = (to - from) / 8, power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= raw);
    pen.strokeStyle = colour("--rule"); pen.fillStyle = colour("--soft"); pen.lineWidth = 1; pen.textAlign = "center";
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const px = Math.round(x(t)) + 0.5;
      pen.beginPath(); pen.moveTo(px, TOP - 6); pen.lineTo(px, full); pen.stroke();
      pen.fillText(time(t), Math.min(px, width - 24), 9);
    }
    ranks.forEach((r, n) => {
      if (top(n + 1, 0) < above || top(n, 0) > above + height) return;
      pen.textAlign = "right"; pen.fillStyle = colour("--ink");
      pen.fillText("rank " + r.rank, LEFT - 10, top(n, 0) + 1.5 * LANE);
      pen.fillStyle = colour("--faint");
      for (let lane = 0; lane < 3; lane++) pen.fillRect(LEFT, top(n, lane) + 1, width - LEFT - 8, LANE - 2);
      r.lanes.forEach((lane, l) => {
        let edge = -1;
        for (let k = first(r.reach[l], from); k < lane.length && r.start[lane[k]] < to; k++) {
          const i = lane[k], a = Math.max(LEFT, x(r.start[i])), b = Math.min(width - 8, x(r.stop[i]));
          if (b < edge + 0.25) continue;  // within a pixel that is already drawn
          pen.fillStyle = colour(COLOUR[KINDS[data.what[r.what[i]][0]]]);
          pen.globalAlpha = data.what[r.what[i]][1] && l === 0 ? 0.72 : 1;
          pen.fillRect(a, top(n, l) + 1, Math.max(0.6, b - a - (b - a > 3 ? 0.5 : 0)), LANE - 2);
          edge = b;
        }
        pen.globalAlpha = 1;
      });
      if (shown && shown[0] === r) {
        const [, i, l] = shown, a = Math.max(LEFT, x(r.start[i])), b = Math.min(width - 8, x(r.stop[i]));
        pen.strokeStyle = colour("--ink"); pen.lineWidth = 2;
        if (b > a) pen.strokeRect(a - 1, top(n, l), b - a + 2, LANE);
      }
    });
    range.textContent = time(from) + " to " + time(to);
  }
  function found(px, py) {
    const n = Math.floor((py - TOP) / ROW), l = Math.floor((py - top(n, 0)) / LANE);
    if (!ranks[n] || l < 0 || l > 2 || px < LEFT) return null;
    const r = ranks[n], t = back(px), slack = ((to - from) / width) * 1.5;
    for (let k = first(r.reach[l], t - slack); k < r.lanes[l].length && r.start[r.lanes[l][k]] <= t + slack; k++)
      if (r.stop[r.lanes[l][k]] >= t - slack) return [r, r.lanes[l][k]];
    return null;
  }
  const of = (owner) => (owner < 0 ? "(several)" : owner);
  function describe([r, i]) {
    const [kind, backward, a, b, work] = data.what[r.what[i]], name = KINDS[kind], took = r.stop[i] - r.start[i];
    let p = 0;
    while (p + 1 < r.locations.length && r.locations[p + 1][0] <= i) p++;
    const [, trainStep, layer, step] = r.locations[p];
    const lines = [`${WORDS[name]} on rank ${r.rank}: ${time(took)}`];
    lines.push(`${backward ? "backward" : "forward"}, ring step ${step}, layer ${layer}, training step ${trainStep}`);
    if (name === "compute") lines.push(`q${of(a)} × kv${of(b)}, ${rate(work, "FLOP")}, ${rate((work / (took * data.unit)) * 1e9, "FLOP/s")}`);
    if (name === "wait") lines.push(`for rank ${a}, block of rank ${b}, ${bytes(work)}`);
    if (name === "transfer") lines.push(`from rank ${a}, block of rank ${b}, ${bytes(work)}, ${rate((work / (took * data.unit)) * 1e9, "B/s")}`);
    lines.push(`at ${time(r.start[i])}`);
    return lines.join("\n");
  }
  function zoom(factor, around) {
    const size = Math.min(end, Math.max(20, (to - from) * factor)), share = (around - from) / (to - from);
    move(around - share * size, size);
  }
  function move(start, size) {
    from = Math.max(0, Math.min(start, end - size)); to = from + size;
    draw();
  }
  // Scroll to the longest wait of a ring step (or its longest event, if no rank waited) and frame it.
  function show(backward, step) {
    let longest = -1;
    for (const r of ranks) r.lanes.forEach((lane, l) => {
      let p = 0;
      for (const i of lane) {
        while (p + 1 < r.locations.length && r.locations[p + 1][0] <= i) p++;
        const took = (r.stop[i] - r.start[i]) * (l === 1 ? 1e6 : 1);
        if (r.locations[p][3] === step && data.what[r.what[i]][1] === backward && took > longest) { longest = took; shown = [r, i, l]; }
      }
    });
    if (longest < 0) return;
    const [r, i] = shown, size = Math.min(end, Math.max(20, 5 * (r.stop[i] - r.start[i])));
    scrollBy(0, box.getBoundingClientRect().top + top(ranks.indexOf(r), 1.5) - innerHeight / 2);
    move((r.start[i] + r.stop[i] - size) / 2, size);
  }
  for (const button of document.querySelectorAll("button.step"))
    button.addEventListener("click", () => show(+button.dataset.backward, +button.dataset.step));
  canvas.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.shiftKey && Math.abs(e.deltaX) > Math.abs(e.deltaY)) return move(from + (e.deltaX / width) * (to - from), to - from), e.preventDefault();
    e.preventDefault(); zoom(Math.exp(e.deltaY * 0.002), back(e.offsetX));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (e) => { held = { px: e.offsetX, from }; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (e) => {
    if (held) { tip.hidden = true; return move(held.from - ((e.offsetX - held.px) / (width - LEFT - 8)) * (to - from), to - from); }
    const hit = found(e.offsetX, e.offsetY + above);
    tip.hidden = !hit;
    if (!hit) return;
    tip.textContent = describe(hit);
    tip.style.left = Math.min(e.offsetX + 14, width - tip.offsetWidth - 4) + "px";
    tip.style.top = e.offsetY + above + 16 + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => move(0, end));
  canvas.addEventListener("keydown", (e) => {
    const size = to - from, steps = { ArrowLeft: -0.2, ArrowRight: 0.2 };
    if (e.key in steps) move(from + steps[e.key] * size, size);
    else if (e.key === "+" || e.key === "=") zoom(0.7, from + size / 2);
    else if (e.key === "-") zoom(1 / 0.7, from + size / 2);
    else if (e.key === "0") move(0, end);
    else return;
    e.preventDefault();
  });
  document.getElementById("in").addEventListener("click", () => zoom(0.5, (from + to) / 2));
  document.getElementById("out").addEventListener("click", () => zoom(2, (from + to) / 2));
  document.getElementById("all").addEventListener("click", () => move(0, end));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
  addEventListener("beforeprint", () => { printing = true; draw(); }); addEventListener("afterprint", () => { printing = false; draw(); });
  addEventListener("resize", () => { tip.hidden = true; draw(); });
  // A window that moves to a screen with finer pixels keeps its size, so it gets no resize event.
  const redrawOnFinerPixels = () => matchMedia(`(resolution: ${devicePixelRatio}dppx)`).addEventListener("change", () => { redrawOnFinerPixels(); draw(); }, { once: true });
  redrawOnFinerPixels();
  addEventListener("scroll", () => {
    const seen = -box.getBoundingClientRect().top;
    if ((seen < above && above > 0) || (seen + innerHeight > above + height && above + height < full)) draw();
  });
  draw();
})();
