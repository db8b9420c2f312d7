'use strict';
// The status page: GET /status again whenever the event stream says something, and every two seconds. Text from the API
// only ever becomes text nodes.
const api = '/admin/v1';
const $ = id => document.getElementById(id);
const speeds = [];
let followed = null, logged = null, lastEvent = 0;

function token() {
  return sessionStorage.getItem('token') || '';
}

async function ask(path, signal) {
  const headers = token() ? {Authorization: 'Bearer ' + token()} : {};
  const answer = await fetch(api + path, {headers, signal, cache: 'no-store', credentials: 'same-origin'});
  if (answer.ok) return answer;
  let message = 'HTTP status ' + answer.status;
  try { message = (await answer.json()).error.message; } catch (e) { /* no JSON: the status says enough */ }
  const error = new Error(message);
  error.status = answer.status;
  throw error;
}

async function lines(path, signal, take) {
  const reader = (await ask(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n');
    rest = parts.pop();
    for (const line of parts) take(line);
  }
}

async function events(path, signal, take) {
  let name = 'message';
  await lines(path, signal, line => {
    if (line.startsWith('event: ')) name = line.slice(7);
    if (line.startsWith('data: ')) take(name, JSON.parse(line.slice(6)));
    if (line === '') name = 'message';
  });
}

function el(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function set(id, text) {
  const node = $(id), value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (i === 0 ? n : n.toFixed(1)) + ' ' + units[i];
}

function span(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 60) return s + ' s';
  if (s < 3600) return Math.floor(s / 60) + ' min';
  if (s < 86400) return Math.floor(s / 3600) + ' h ' + Math.floor(s % 3600 / 60) + ' min';
  return Math.floor(s / 86400) + ' d ' + Math.floor(s % 86400 / 3600) + ' h';
}

function clock(ms) {
  return new Date(ms).toLocaleTimeString();
}

function fill(meter, share, label, warn, bad) {
  meter.className = 'meter' + (share >= bad ? ' bad' : share >= warn ? ' warn' : '');
  meter.setAttribute('role', 'meter');
  meter.setAttribute('aria-valuemin', '0');
  meter.setAttribute('aria-valuemax', '100');
  meter.setAttribute('aria-valuenow', Math.round(share * 100));
  meter.setAttribute('aria-label', label);
  if (!meter.firstChild) meter.append(el('div'));
  meter.firstChild.style.width = Math.min(100, share * 100) + '%';
}

function meterOf(share, label, warn, bad) {
  const meter = el('div');
  fill(meter, share, label, warn, bad);
  return meter;
}

const kind = {up: 'good', failed: 'bad', down: '', draining: 'warn', preparing: 'warn', loading: 'warn', warming: 'warn'};

function showCluster(status) {
  const c = status.cluster;
  set('name', c ? c.name : 'worker');
  document.title = (c ? c.name + ' ' + c.state : 'worker') + ' · glm53';
  const state = $('state');
  set('state', c ? c.state : 'worker');
  state.className = 'badge ' + (c ? kind[c.state] || '' : '');
  const since = c ? 'for ' + span(Date.now() - c.state_since) : 'its head shows the cluster';
  const generation = c && c.generation ? ' · generation ' + c.generation : '';
  set('reason', [c && c.reason, since + generation].filter(Boolean).join(' · '));
}

function showFigures(status) {
  const a = status.api, p = status.pools, m = status.model;
  document.querySelector('.cards').hidden = !a;
  if (!a) return;
  set('speed', a.tokens_per_second.toFixed(1));
  speeds.push(a.tokens_per_second);
  if (speeds.length > 60) speeds.shift();
  const top = Math.max(1, ...speeds);
  $('spark').firstElementChild.setAttribute('points',
    speeds.map((v, i) => (i * 120 / 59).toFixed(1) + ',' + (27 - v / top * 25).toFixed(1)).join(' '));
  set('running', a.requests_running);
  set('waiting', a.requests_waiting);
  set('kv', p && p.blocks_total ? Math.round(p.blocks_used / p.blocks_total * 100) + ' %' : '–');
  fill($('kv-meter'), p && p.blocks_total ? p.blocks_used / p.blocks_total : 0, 'KV cache in use', .85, .97);
  set('kv-text', p ? p.blocks_used + ' of ' + p.blocks_total + ' blocks, ' + p.blocks_cached + ' cached; ' +
      p.slots_used + ' of ' + p.slots_total + ' state slots' : 'no ranks');
  set('hits', p && p.prefix_queries ? Math.round(p.prefix_hits / p.prefix_queries * 100) + ' %' : '–');
  set('hits-text', p ? p.snapshots_used + ' of ' + p.snapshots_total + ' snapshots; ' + p.preemptions + ' put back' : '');
  set('model', m.name || '–');
  set('model-text', [m.repo, m.revision && m.revision.slice(0, 12), m.digest && 'digest ' + m.digest.slice(0, 12),
    a.url].filter(Boolean).join(' · '));
}

function showWarnings(status) {
  const boxes = status.warnings.map(w => {
    const box = el('div', null, 'warning ' + w.severity);
    box.append(el('p', w.text), el('p', w.remedy && 'try: ' + w.remedy, 'quiet'));
    return box;
  });
  replace($('warnings'), boxes);
}

/// Only where something differs: who reads or selects is not disturbed.
function replace(parent, children) {
  const now = el('div');
  now.append(...children);
  if (now.innerHTML !== parent.innerHTML) parent.replaceChildren(...now.childNodes);
}

function processRow(p) {
  const row = el('tr');
  const state = p.state + (p.state === 'ready' || p.state === 'exited' ? '' : ' (' + p.phase + ')');
  const share = p.progress && p.progress[1] ? Math.round(p.progress[0] / p.progress[1] * 100) + ' %' : '';
  const end = p.exit ? p.exit.text : p.last_error;
  row.append(el('td', p.name), el('td', [state, share].filter(Boolean).join(' ')), el('td', p.memory_bytes ? bytes(p.memory_bytes) : ''),
    el('td', p.exit ? span(p.exit.ms_ago) + ' ago' : span(p.started_ms_ago)), el('td', end, 'error'));
  return row;
}

function nodeBox(n) {
  const box = el('div', null, 'node'), title = el('h3', n.name);
  title.append(el('span', n.reachable ? 'answers' : 'silent', 'badge ' + (n.reachable ? 'good' : 'bad')));
  box.append(title, el('p', [n.role, n.address, n.agent.version && 'agent ' + n.agent.version].filter(Boolean).join(' · '), 'quiet'));
  if (n.memory.total) {
    const used = n.memory.total - n.memory.available;
    box.append(meterOf(used / n.memory.total, 'Memory in use', .9, .97),
      el('p', 'memory: ' + bytes(used) + ' of ' + bytes(n.memory.total) + ', ' + bytes(n.memory.available) + ' available', 'quiet'));
  }
  if (n.download && n.download.state === 'fetching') {
    const d = n.download;
    box.append(meterOf(d.bytes_total ? d.bytes_done / d.bytes_total : 0, 'Download', 2, 2),
      el('p', d.model + ': ' + bytes(d.bytes_done) + ' of ' + bytes(d.bytes_total) + ', ' + bytes(d.rate) + '/s', 'quiet'));
  }
  const table = el('table'), head = el('tr');
  for (const title of ['Process', 'State', 'Memory', 'Age', 'Last error']) {
    const cell = el('th', title);
    cell.scope = 'col';
    head.append(cell);
  }
  const top = el('thead'), rows = el('tbody');
  top.append(head);
  rows.append(...n.processes.map(processRow));
  table.append(top, rows);
  if (n.processes.length) box.append(table);
  return box;
}

function showProcesses(status) {
  const names = ['agent'];
  for (const n of status.nodes) for (const p of n.processes) if (!names.includes(p.name)) names.push(p.name);
  const select = $('process');
  if ([...select.options].map(o => o.value).join() === names.join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map(name => el('option', name)));
  select.value = names.includes(chosen) ? chosen : names.includes('rank0') ? 'rank0' : 'agent';
  followLog();
}

function showOperation(status) {
  const id = status.cluster && status.cluster.operation;
  if (!id || (followed && followed.id === id)) {
    if (!id && !followed) $('operation').hidden = true;
    return;
  }
  followed = {id};
  $('operation').hidden = false;
  $('progress').replaceChildren();
  set('operation-text', id);
  const bars = new Map();
  events('/operations/' + encodeURIComponent(id) + '/events', undefined, (name, data) => {
    if (name === 'action') set('operation-text', id + ': ' + (data.text || data.kind));
    if (name === 'done') set('operation-text', id + ' ' + data.state + (data.error ? ': ' + data.error.message : ''));
    if (name === 'progress') {
      const key = data.node + data.process;
      if (!bars.has(key)) {
        const bar = el('li');
        bar.append(el('span', '', 'quiet'), el('div'));
        bars.set(key, bar);
        $('progress').append(bar);
      }
      const [caption, meter] = bars.get(key).children;
      const share = data.progress && data.progress[1] ? data.progress[0] / data.progress[1] : 0;
      caption.textContent = [data.node, data.process, data.phase, data.rate && bytes(data.rate) + '/s'].filter(Boolean).join(' · ');
      fill(meter, share, data.process, 2, 2);
    }
  }).catch(() => {}).finally(() => setTimeout(() => {
    $('operation').hidden = true;
    followed = null;
  }, 5000));
}

async function refresh() {
  try {
    const status = await (await ask('/status')).json();
    $('login').hidden = true;
    $('content').hidden = false;
    set('link', '');
    showCluster(status);
    showWarnings(status);
    showFigures(status);
    replace($('nodes'), status.nodes.map(nodeBox));
    showProcesses(status);
    showOperation(status);
    if (lastEvent === 0) status.last_events.forEach(showEvent);  // the stream goes on behind them
    return true;
  } catch (e) {
    if (e.status === 401) {
      $('login').hidden = false;
      $('content').hidden = true;
      if (token()) set('denied', e.message);
      return false;
    }
    set('link', 'no answer: ' + e.message);
    return true;
  }
}

function showEvent(e) {
  lastEvent = Math.max(lastEvent, e.id);
  if (e.level === 'debug') return;
  const item = el('li'), time = el('time', clock(e.at));
  time.dateTime = new Date(e.at).toISOString();
  item.append(time, el('span', e.text, e.level === 'error' ? 'bad' : ''));
  $('events').prepend(item);
  while ($('events').childElementCount > 200) $('events').lastElementChild.remove();
}

async function followEvents() {
  for (;;) {
    try {
      await events('/events?follow=1&after=' + lastEvent, undefined, (name, e) => {
        showEvent(e);
        schedule();
      });
    } catch (e) { if (e.status === 401) return; }
    await new Promise(done => setTimeout(done, 2000));
  }
}

function followLog() {
  if (logged) logged.abort();
  logged = new AbortController();
  const signal = logged.signal, log = $('log'), name = $('process').value;
  log.textContent = '';
  lines('/logs?lines=200&follow=1&process=' + encodeURIComponent(name), signal, line => {
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    log.append(line + '\n');
    while (log.childNodes.length > 1000) log.firstChild.remove();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }).catch(e => { if (e.name !== 'AbortError') log.append('[' + e.message + ']\n'); });
}

let timer = 0;
function schedule() {
  clearTimeout(timer);
  timer = setTimeout(tick, 100);
}
async function tick() {
  if (!await refresh()) return;
  clearTimeout(timer);
  timer = setTimeout(tick, 2000);
}

async function begin() {
  if (!await refresh()) return;
  followEvents();
  tick();
}

$('login').addEventListener('submit', e => {
  e.preventDefault();
  sessionStorage.setItem('token', $('token').value.trim());
  set('denied', '');
  begin();
});
$('process').addEventListener('change', followLog);
$('theme').addEventListener('click', () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === 'dark'
    : matchMedia('(prefers-color-scheme: dark)').matches;
  document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  localStorage.setItem('theme', document.documentElement.dataset.theme);
});
const theme = localStorage.getItem('theme');
if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
begin();
