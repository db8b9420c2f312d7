// The chat page: a conversation in this tab, the settings on this device, the key where the user wants it.
import { EventStream, addChunk, newAnswer, refusal, requestBody, retryDelay } from './stream.mjs';
import { AnswerView, thumbnails, userMessage } from './view.mjs';

const $ = id => document.getElementById(id);
const fields = $('values').elements;
const triesOfRefused = 5;
let messages = [];
let images = [];
let editing = false;    // the next message takes the place of the last one
let running = null;     // AbortController of the answer that streams
const views = new WeakMap();  // AnswerView of an answer: a fold that somebody opened stays open
let afterKey = () => {};

// ---- what is kept -----------------------------------------------------------------------------------------------------

/// Null where the browser keeps nothing for this page; what load() and save() then throw is caught there.
function storageOf(name) {
  try {
    return window[name];
  } catch (e) {
    return null;
  }
}
const local = storageOf('localStorage'), session = storageOf('sessionStorage');
let held = '';  // the key, while the page lives

function load(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch (e) {
    return null;  // no storage, or not ours
  }
}

function save(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch (e) {
    drop(storage, name);  // full or forbidden: the page works without, and shows nothing old
  }
}

function drop(storage, name) {
  try {
    storage.removeItem(name);
  } catch (e) { /* nothing is there then */ }
}

function key() {
  return held || load(session, 'key') || load(local, 'key') || '';
}

function forgetKey() {
  held = '';
  drop(session, 'key');
  drop(local, 'key');
  $('forget').hidden = true;
}

function settings() {
  const values = {};
  for (const field of fields) if (field.name) values[field.name] = field.type === 'checkbox' ? field.checked : field.value;
  return values;
}

function restore() {
  const values = load(local, 'settings') || {};
  for (const field of fields) {
    const value = values[field.name];
    if (field.type === 'checkbox' && typeof value === 'boolean') field.checked = value;
    else if (field.type !== 'checkbox' && typeof value === 'string' && field.name !== 'model') field.value = value;
  }
  const kept = load(session, 'chat');
  if (Array.isArray(kept)) messages = kept.map(m => m.role === 'assistant' ? {...newAnswer(), ...m} : m);
}

// ---- the conversation ---------------------------------------------------------------------------------------------------

function results() {
  return Object.fromEntries(messages.filter(m => m.role === 'tool').map(m => [m.id, m.text]));
}

function viewOf(answer) {
  if (!views.has(answer)) views.set(answer, new AnswerView(answer));
  return views.get(answer);
}

function draw() {
  const given = results(), lastUser = messages.findLastIndex(m => m.role === 'user');
  $('talk').replaceChildren(...messages.flatMap((m, i) => {
    if (m.role === 'user') return [userMessage(m, i === lastUser && !running ? edit : null)];
    if (m.role === 'tool') return [];  // stands in its call
    const view = viewOf(m);
    view.finish(given, i === messages.length - 1 && !running ? actions : null);
    return [view.node];
  }));
  $('empty').hidden = messages.length > 0 || !$('login').hidden;
}

function atEnd() {
  const s = $('scroll');
  return s.scrollTop + s.clientHeight >= s.scrollHeight - 40;
}

function toEnd() {
  $('scroll').scrollTop = $('scroll').scrollHeight;
}

function setRunning(controller) {
  running = controller;
  $('send').hidden = Boolean(controller);
  $('stop').hidden = !controller;
}

function say(text) {
  $('said').textContent = text;
}

const actions = {
  retry: () => {
    if (running) return;
    while (messages.length && messages.at(-1).role === 'assistant') messages.pop();
    respond();
  },
  results: texts => {
    if (running) return;
    messages.push(...texts);
    respond();
  },
  edit: () => edit(),
};

function edit() {
  const last = messages.findLast(m => m.role === 'user');
  if (running || !last) return;
  setEditing(true);
  $('text').value = last.text;
  images = [...(last.images || [])];
  drawImages();
  grow();
  $('text').focus();
}

function setEditing(value) {
  editing = value;
  $('editing').hidden = !value;
  if (!value) {
    $('text').value = '';
    images = [];
    drawImages();
    grow();
  }
}

function submit() {
  const text = $('text').value.trim();
  if (running || (!text && !images.length)) return;
  if (editing) messages.length = messages.findLastIndex(m => m.role === 'user');
  messages.push({role: 'user', text, images});
  setEditing(false);
  respond();
}

/// Streams the answer to what was said so far.
async function respond() {
  const answer = newAnswer(), controller = new AbortController(), first = messages;
  setRunning(controller);
  draw();
  const view = viewOf(answer);
  $('talk').append(view.node);
  view.update(true);
  toEnd();
  say('Waiting for the answer');
  if (document.activeElement === document.body && matchMedia('(pointer: fine)').matches) $('text').focus();  // its button is gone
  let timer = 0;
  const paint = () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = 0;
      const follow = atEnd();
      view.update(true);
      if (follow) toEnd();
    }, 40);
  };
  let denied = false;
  try {
    const body = JSON.stringify(requestBody(settings(), $('models').value, messages));
    const response = await ask(body, controller.signal, view);
    view.say('');
    if (!$('models').options.length) loadModels();  // the server was away when the page came
    await read(response, answer, paint);
    if (!answer.finish && !answer.error) answer.error = 'The connection ended before the answer did.';
  } catch (e) {
    denied = e.status === 401;
    if (e.name === 'AbortError') answer.stopped = true;
    else answer.error = e.status || !(e instanceof TypeError) ? e.message : 'No answer from the server (' + e.message + ').';
  }
  clearTimeout(timer);
  if (messages !== first) return;  // a new chat began
  setRunning(null);
  if (denied) {
    draw();
    askKey(answer.error, respond);
    return;
  }
  const follow = atEnd();
  messages.push(answer);
  save(session, 'chat', messages);
  draw();
  if (follow) toEnd();
  say(answer.error ? '' : answer.stopped ? 'Stopped' : answer.calls.length ? 'The model calls a tool' : 'Answer: ' + answer.content.slice(0, 1500));
}

function headers() {
  return key() ? {Authorization: 'Bearer ' + key()} : {};
}

async function refused(response) {
  const error = new Error(refusal(response.status, await response.text()));
  error.status = response.status;
  return error;
}

/// Sends a request; one that was refused for now again when the server says.
async function ask(body, signal, view) {
  for (let tries = 1;; tries++) {
    const response = await fetch('/v1/chat/completions', {method: 'POST', body, signal, cache: 'no-store', credentials: 'same-origin',
      headers: {'Content-Type': 'application/json', ...headers()}});
    if (response.ok) return response;
    const error = await refused(response);
    if (![429, 503].includes(response.status) || tries === triesOfRefused) throw error;
    const until = Date.now() + 1000 * retryDelay(response.status, response.headers.get('Retry-After'), Date.now());
    for (let left; (left = Math.ceil((until - Date.now()) / 1000)) > 0;) {
      view.say(`${error.message} Trying again in ${left} s.`);
      await pause(Math.min(1000, until - Date.now()), signal);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener('abort', () => {
      clearTimeout(timer);
      reject(new DOMException('stopped', 'AbortError'));
    }, {once: true});
  });
}

async function read(response, answer, paint) {
  const started = performance.now();
  let done = false;
  const stream = new EventStream(data => {
    if (data === '[DONE]') { done = true; return; }
    let chunk = null;
    try {
      chunk = JSON.parse(data);
    } catch (e) {
      answer.error = 'The server sent an event that is no JSON.';
    }
    const before = answer.content || answer.calls.length;
    if (!addChunk(answer, chunk)) return;
    const now = performance.now();
    answer.firstMs ??= now;
    answer.lastMs = now;
    if (!before && (answer.content || answer.calls.length) && answer.reasoning) answer.thoughtMs = now - started;
    paint();
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  while (!done) {
    const {value, done: ended} = await reader.read();
    if (ended) break;
    stream.feed(value);
  }
  reader.cancel().catch(() => {});
}

// ---- key and models -----------------------------------------------------------------------------------------------------

function askKey(message, then) {
  afterKey = then;
  $('login').hidden = false;
  $('empty').hidden = true;
  $('denied').textContent = key() ? message : '';
  forgetKey();
  $('login').scrollIntoView({block: 'nearest'});
  $('key').focus();
}

async function loadModels() {
  try {
    const response = await fetch('/v1/models', {headers: headers(), cache: 'no-store', credentials: 'same-origin'});
    if (!response.ok) throw await refused(response);
    const names = (await response.json()).data.map(model => String(model.id));
    const wanted = (load(local, 'settings') || {}).model;
    $('models').replaceChildren(...names.map(name => new Option(name, name)));
    if (names.includes(wanted)) $('models').value = wanted;
    showModel();
    $('forget').hidden = !key();
    return true;
  } catch (e) {
    if (e.status === 401) askKey(e.message, () => {});
    else $('model').textContent = 'no answer: ' + e.message;
    return false;
  }
}

function showModel() {
  $('model').textContent = $('models').value;
  document.title = $('models').value + ' · glm53 chat';
}

$('login').addEventListener('submit', async e => {
  e.preventDefault();
  const then = afterKey;
  held = $('key').value.trim();
  save($('keep').checked ? local : session, 'key', held);
  $('key').value = '';
  if (!await loadModels()) {
    afterKey = then;
    return;
  }
  $('login').hidden = true;
  draw();
  $('text').focus();
  then();
});
$('forget').addEventListener('click', forgetKey);

// ---- composer -----------------------------------------------------------------------------------------------------------

function grow() {
  const text = $('text');
  text.style.height = 'auto';
  text.style.height = text.scrollHeight + 'px';
}

function drawImages() {
  $('images').replaceChildren(...thumbnails(images, i => {
    images.splice(i, 1);
    drawImages();
    $('text').focus();
  }));
}

async function attach(files) {
  for (const file of files) {
    if (!file.type.startsWith('image/')) continue;
    images.push(await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    }));
  }
  drawImages();
}

$('composer').addEventListener('submit', e => {
  e.preventDefault();
  submit();
});
$('text').addEventListener('input', grow);
$('text').addEventListener('keydown', e => {
  if (e.key !== 'Enter' || e.shiftKey || e.isComposing) return;
  e.preventDefault();
  submit();
});
$('text').addEventListener('paste', e => {
  if (e.clipboardData.files.length) {
    e.preventDefault();
    attach(e.clipboardData.files);
  }
});
$('attach').addEventListener('click', () => $('files').click());
$('files').addEventListener('change', async () => {
  await attach($('files').files);
  $('files').value = '';
  $('text').focus();
});
$('unedit').addEventListener('click', () => {
  setEditing(false);
  $('text').focus();
});
$('stop').addEventListener('click', () => {
  running.abort();
  $('text').focus();
});
$('new').addEventListener('click', () => {
  if (running) running.abort();
  setRunning(null);
  messages = [];
  save(session, 'chat', messages);
  setEditing(false);
  say('New chat');
  draw();
  $('text').focus();
});

// ---- settings, theme, keys ----------------------------------------------------------------------------------------------

function showSettings(open) {
  $('settings').hidden = !open;
  $('options').setAttribute('aria-expanded', String(open));
  if (open) $('close').focus();
  else $('options').focus();
}

function checkSettings() {
  try {
    requestBody(settings(), '', []);
    $('wrong').textContent = '';
  } catch (e) {
    $('wrong').textContent = e.message.replace('; see Settings', '');
  }
  fields.effort.disabled = !fields.thinking.checked;
}

function keepSettings() {
  save(local, 'settings', settings());
  checkSettings();
  showModel();
}

$('options').addEventListener('click', () => showSettings($('settings').hidden));
$('close').addEventListener('click', () => showSettings(false));
$('values').addEventListener('submit', e => e.preventDefault());
$('values').addEventListener('change', keepSettings);
$('values').addEventListener('reset', () => setTimeout(keepSettings));
document.addEventListener('keydown', e => {
  if (e.key !== 'Escape' || e.isComposing) return;
  if (running) running.abort();
  else if (editing) setEditing(false);
  else if (!$('settings').hidden) showSettings(false);
});
$('theme').addEventListener('click', () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
  save(local, 'theme', root.dataset.theme);
});
const theme = load(local, 'theme');
if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;

restore();
checkSettings();
draw();
loadModels();
$('text').focus();
