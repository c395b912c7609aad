// Ask the server. Answers to a question that is no longer of interest are dropped by their signal.

export async function get(path, query = {}, signal) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") asked.append(name, one);
    }
  }
  const text = asked.toString();
  const response = await fetch(text ? `${path}?${text}` : path, { signal });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? `the server answered ${response.status}`);
  return answer;
}

export const getRuns = (signal) => get("/api/runs", {}, signal);
export const getRun = (id, signal) => get(`/api/runs/${id}`, {}, signal);
export const getHealth = (id, signal) => get(`/api/runs/${id}/health`, {}, signal);
export const getCurves = (query, signal) => get("/api/curves", query, signal);
export const getDifferences = (ids, signal) => get("/api/differences", { run: ids }, signal);
export const getCompletions = (id, query, signal) =>
  get(`/api/runs/${id}/completions`, query, signal);

// Call `onChange` with the ids of runs that have grown. The browser connects again by itself.
export function follow(onChange, onState) {
  const source = new EventSource("/api/changes");
  source.onopen = () => onState("live");
  source.onerror = () => onState("no connection");
  source.onmessage = (event) => onChange(JSON.parse(event.data));
}
