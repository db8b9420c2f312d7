// Answers for pictures of the page: a conversation in which everything that it can show occurs.
const chunk = (delta, finish = null) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] })}\n\n`;
const usage = (prompt, completion, cached) => `data: ${JSON.stringify({
  choices: [], usage: { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: { cached_tokens: cached } },
})}\n\ndata: [DONE]\n\n`;

const reasoning = 'The user wants the weather in two cities, and there is a tool for it. Two calls, one a city.';
const prose = `Take an umbrella to **Zürich**; Bern stays dry.

1. Zürich: rain from noon, 14 °C
2. Bern: sun
   - wind from the west
   - \`UV index\` of 6

### The same in Python

\`\`\`python
def umbrella(city: str) -> bool:
    return forecast(city).rain > 0.2  # mm/h
\`\`\`

<b>This</b> is no HTML, and [this](https://example.org) is no link.`;

export const question = 'Do I need an umbrella in Zürich or Bern today?';

/// The answer to a request: calls first, then, once their results are there, prose.
export function answer(request) {
  const { messages } = JSON.parse(request.postData);
  const body = messages.at(-1).role === 'tool' ?
    chunk({ role: 'assistant', content: '' }) + chunk({ content: prose }) + chunk({}, 'stop') + usage(312, 126, 256) :
    chunk({ role: 'assistant', content: '' }) + chunk({ reasoning_content: reasoning }) +
    ['Zürich', 'Bern'].map((city, i) => chunk({ tool_calls: [{ index: i, id: `c${i}`, type: 'function', function: { name: 'get_weather', arguments: '' } }] }) +
      chunk({ tool_calls: [{ index: i, function: { arguments: JSON.stringify({ city, days: 1 }) } }] })).join('') +
    chunk({}, 'tool_calls') + usage(184, 61, 0);
  return { headers: { 'Content-Type': 'text/event-stream; charset=utf-8' }, body };
}

/// Text without what differs from run to run.
export const still = "for (const f of document.querySelectorAll('.figures')) f.textContent = f.textContent.replace(/ out.*/, ' out · 42.0 tokens/s');" +
  "for (const s of document.querySelectorAll('summary')) s.textContent = 'Thought for 2 s';";
